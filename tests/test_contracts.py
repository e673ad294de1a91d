"""The direction of imports, the vocabulary's coverage, and documents that are printed from code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrace import stages

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvtrace", "instrumented_connectors")
# Which contract an injected line breaks: the file it goes into, the line.
VIOLATIONS = {
    "kvtrace points one way": ("kvtrace/wire.py", "import kvtrace.report.style"),
    "engine processes load only the emit side": ("instrumented_connectors/nixl.py", "import numpy"),
    "the analysis core is pure": ("kvtrace/model.py", "import time"),
    "only the store speaks to DuckDB": ("kvtrace/report/population.py", "import duckdb"),
    "only the report draws": ("kvtrace/cli/doctor.py", "import rich.text"),
}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the tree at `folder`, and of no other tree that may be installed."""
    program = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of the packages and of pyproject.toml."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_point_one_way() -> None:
    done = lint_imports(ROOT)

    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_every_contract_reports_its_violation_and_a_module_without_a_place_is_one(copied: Path) -> None:
    for file, line in VIOLATIONS.values():
        path = copied / file
        head, future, rest = path.read_text(encoding="utf-8").partition("from __future__ import annotations\n")
        path.write_text(f"{head}{future}{line}\n{rest}", encoding="utf-8")
    (copied / "kvtrace" / "unplaced.py").write_text('"""A module that nobody placed."""\n', encoding="utf-8")

    done = lint_imports(copied)

    assert done.returncode == 1
    assert {name for name in VIOLATIONS if f"{name} BROKEN" in done.stdout} == set(VIOLATIONS)
    assert "kvtrace.unplaced" in done.stdout


def test_every_violation_is_of_a_contract_that_exists() -> None:
    declared = re.findall(r'^name = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)

    assert set(VIOLATIONS) == set(declared) - {"kvtrace"}


def test_every_stage_is_emitted_somewhere() -> None:
    emitting = [*(ROOT / "instrumented_connectors").glob("*.py"), *(ROOT / "kvtrace" / "router").glob("*.py")]
    emitting += [*(ROOT / "kvtrace" / "importers").glob("*.py")]
    emitting += [ROOT / "kvtrace" / name for name in ("emit.py", "spool.py", "series.py", "clock.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in emitting if path.exists())
    constants = {id(value): name for name, value in vars(stages).items() if isinstance(value, stages.Stage)}

    assert [stage.name for stage in stages.STAGES if not re.search(rf"\b{constants[id(stage)]}\b", text)] == []


def test_every_cause_is_charged_somewhere() -> None:
    """A cause is charged by an edge of the vocabulary or by the code that divides a wait."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "kvtrace").glob("*.py"))
    constants = {id(value): name for name, value in vars(stages).items() if isinstance(value, stages.Cause)}
    uncharged = [
        cause.name
        for cause in stages.CAUSES
        # Once where it is declared and once where it is used, or by a name put together from the side.
        if len(re.findall(rf"\b{constants[id(cause)]}\b", text)) < 2
        and f"{{side}}.{cause.name.partition('.')[2]}" not in text
    ]

    assert uncharged == []


def test_documents_are_what_the_code_prints() -> None:
    """The vocabulary's tables, and those of docs/figures.json: what `make tables` prints is there already."""
    named = re.search(r"^DOCUMENTS := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert named is not None
    documents = named[1].split()
    printed = [
        str(path.relative_to(ROOT))
        for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "dashboards").rglob("*.md")])
        if "[[[cog" in path.read_text(encoding="utf-8")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "cogapp", "--check", *documents], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(documents) == printed
    assert {"README.md", "docs/costs.md", "docs/words.md"} <= set(printed)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git")
@pytest.mark.parametrize("written", ["run.duckdb", "demo/push.duckdb", "events.csv", "grafana/README.md"])
def test_what_the_readme_has_one_write_is_ignored(written: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert written.partition("/")[0] in readme
    assert subprocess.run(["git", "check-ignore", "-q", written], cwd=ROOT, check=False).returncode == 0


def test_links_between_documents_lead_somewhere() -> None:
    """To a file that is there and, in one of ours, to a heading that it has."""
    lost = []
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                lost.append((document.name, link))

    assert lost == []


def anchors(document: Path) -> set[str]:
    """Return what GitHub calls the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
