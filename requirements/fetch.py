"""usage: PYTHON requirements/fetch.py VENV FILE: install the pinned packages of FILE into VENV; says why it cannot.

By uv, which takes seconds where pip takes minutes and is told of pip's settings, so that mirrors serve both; by pip
where uv is not to be had or fails. Each tries twice, since an index may fail once. Needs pip and the standard library.
"""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OLDEST_PIP = (22, 3)
# A set-up asks nothing, and pip's settings for a user's own packages are none for an environment's.
PIP_VARIABLES = {
    "PIP_NO_INPUT": "1",
    "PIP_USER": "0",
    "PIP_REQUIRE_VIRTUALENV": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}
WAIT_S = "60"  # a wheel of hundreds of MB may stop for a while
TRIES = 2
_SECTIONS = (":env:", "install", "global")
_MISSING = re.compile(r"No matching distribution found for (\S+)")


def pip(venv: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python's pip for the environment."""
    command = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), *arguments]
    return subprocess.run(command, env={**os.environ, **PIP_VARIABLES}, text=True, check=False, **options)


def settings(listed: str) -> dict[str, str]:
    """Return what pip takes for its `install`, by name, of what `pip config list` says: the environment's first."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found and value[:1] in ("'", '"'):
            found[section][name] = ast.literal_eval(value)
    # pip passes over empty values.
    return {name: value for section in reversed(_SECTIONS) for name, value in found[section].items() if value.strip()}


def told(given: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return pip's settings in uv's words: arguments, and variables for what may hold a password."""
    arguments = []
    for name, option in (
        ("find-links", "--find-links"), ("constraint", "--constraints"), ("trusted-host", "--allow-insecure-host"),
    ):  # fmt: skip
        for value in given.get(name, "").split():
            arguments += [option, value]
    if given.get("no-index", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        arguments.append("--no-index")
    variables = {"UV_HTTP_TIMEOUT": WAIT_S}
    for name, variable in VARIABLES.items():
        if name in given:
            variables[variable] = " ".join(given[name].split())
    if keyring := given.get("keyring-provider"):
        variables["UV_KEYRING_PROVIDER"] = "disabled" if keyring == "disabled" else "subprocess"
    certificates = given.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if certificates:
        variables["SSL_CERT_DIR" if Path(certificates).is_dir() else "SSL_CERT_FILE"] = certificates
    kept = {name: value for name, value in variables.items() if not os.environ.get(name)}
    if "proxy" in given:  # to pip this one goes before the environment's
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            kept |= {name: given["proxy"], name.lower(): given["proxy"]}
    return arguments, kept


def sweep(venv: Path) -> None:
    """Let packages be installed anew that an interrupted set-up has left without their last files."""
    for record in venv.glob("lib/python*/site-packages/*.dist-info"):
        if not (record / "INSTALLER").is_file() or not (record / "RECORD").is_file():
            shutil.rmtree(record)
    shutil.rmtree(venv / "uv-cache", ignore_errors=True)


def by_uv(venv: Path, file: Path, given: dict[str, str]) -> bool:
    """Return whether uv has installed the packages."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if pip(
        venv, "-qq", "install", "--no-compile", "--no-deps", "--only-binary", "uv", "-r", str(HERE / "uv.txt"), **quiet
    ).returncode:
        return False
    arguments, variables = told(given)
    cache, log = venv / "uv-cache", venv / "uv.log"  # a cache on the file system of the packages: linked, not copied
    # As pip does: the best version that any of the indexes has.
    command = [
        str(venv / "bin/uv"), "pip", "install", "-q", "--python", str(venv / "bin/python"), "--no-deps", "--no-config",
        "--cache-dir", str(cache), "--index-strategy", "unsafe-best-match", *arguments, "-r", str(file),
    ]  # fmt: skip
    try:
        with log.open("w") as heard:
            for _ in range(TRIES):  # what it has got by then lies in the cache
                done = subprocess.run(
                    command,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=heard,
                    stderr=heard,
                    check=False,
                )
                if not done.returncode:
                    break
    except OSError as error:  # a binary for another machine, a file system without room or without programs
        print(f"uv could not be run ({error.strerror})", file=sys.stderr)
        return False
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    if done.returncode:
        print(f"uv could not install {file.name} (why: {log}); pip tries, which takes minutes", file=sys.stderr)
        sweep(venv)
        return False
    log.unlink(missing_ok=True)
    return True


def by_pip(venv: Path, file: Path) -> int:
    """Install the packages by pip, say why it cannot, and return the exit code."""
    for _ in range(TRIES):
        done = pip(venv, "-qq", "install", "--no-compile", "--no-deps", "-r", str(file), stderr=subprocess.PIPE)
        missing = _MISSING.search(done.stderr)
        if not done.returncode or missing:  # pip has asked often enough by then
            break
    if done.returncode:
        print(done.stderr.rstrip(), file=sys.stderr)
        why = explained(venv, file, missing[1]) if missing else "mend what pip says"
        print(f"{file.name} could not be installed into {venv}: {why}; then run make again", file=sys.stderr)
    return done.returncode


def explained(venv: Path, file: Path, wanted: str) -> str:
    """Return what to do about a package that pip has not found: it says the same if no index answers."""
    others = [line.partition("==")[0] for line in file.read_text().splitlines() if re.match(r"\w", line)]
    beside = next((name for name in others if name != wanted.partition("==")[0]), "pip")
    if not has(venv, beside):
        settings_of = f"`{sys.executable} -m pip config list`"
        return f"{beside} is not to be had either, so look at the network and at the indexes that {settings_of} names"
    if wanted.endswith("+cpu"):
        return f"{wanted} is one of PyTorch's CPU builds: add PyTorch's own index of them by PIP_EXTRA_INDEX_URL"
    where = f"Python {sys.version_info.major}.{sys.version_info.minor} on {sysconfig.get_platform()}"
    return f"no index has {wanted} for {where}, others they have: add an index that has it, or take another Python"


def has(venv: Path, name: str) -> bool:
    """Return whether an index has the package for this platform and Python."""
    return pip(venv, "-qq", "--retries", "1", "index", "versions", name, capture_output=True).returncode == 0


def pip_settings() -> dict[str, str]:
    """Return pip's settings; end with a message where there is no pip or too old a one."""
    version = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    found = re.match(r"pip (\d+)\.(\d+)", version.stdout)
    if found is None or tuple(map(int, found.groups())) < OLDEST_PIP:
        what = f"pip is {found[1]}.{found[2]}" if found else "there is no pip"
        sys.exit(
            f"{sys.executable}: {what}, and 22.3 or later is needed: see `{sys.executable} -m ensurepip --upgrade`"
        )
    aloud = {**os.environ, "PIP_QUIET": "0", "PIP_VERBOSE": "0"}  # a quiet pip lists nothing
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], env=aloud, stdout=subprocess.PIPE, text=True, check=False
    )
    if listed.returncode:
        sys.exit(f"{sys.executable} -m pip config list: pip cannot read its settings; mend them and run make again")
    return settings(listed.stdout)


def main(venv: Path, file: Path) -> int:
    """Install the packages of a file into an environment, one set-up at a time; return the exit code."""
    given = pip_settings()
    with (venv / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another set-up works on {venv}: waiting for its end", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(venv)
        return 0 if by_uv(venv, file, given) else by_pip(venv, file)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that what was begun is cleared away
    try:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except OSError as error:
        sys.exit(f"{error.filename or sys.argv[1]}: {error.strerror}; the set-up has stopped, run make again")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that the shell above ends too
