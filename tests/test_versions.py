"""What the connectors rely on in vLLM, as a table, checked against the source of a release.

The installed vLLM is checked wherever there is one. Before a release is called supported, its unpacked
wheel is checked too: `KVTRACE_VLLM_TREES=FOLDER[:FOLDER…] pytest tests/test_versions.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

from instrumented_connectors import privates, versions
from kvtrace.errors import VersionError

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
NIXL = "distributed/kv_transfer/kv_connector/v1/nixl"
SCHEDULER = "v1/core/sched/scheduler.py"
RUNNER = "v1/worker/kv_connector_model_runner_mixin.py"

# (file, class, method, the parameters that observers name)
METHODS = [
    (BASE, "KVConnectorBase_V1", "bind_connector_metadata", ["connector_metadata"]),
    (BASE, "KVConnectorBase_V1", "clear_connector_metadata", []),
    (BASE, "KVConnectorBase_V1", "finish_forward", []),
    (BASE, "KVConnectorBase_V1", "on_new_request", ["request"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "on_new_request", ["request"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "get_num_new_matched_tokens", ["request", "num_computed_tokens"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "update_state_after_alloc",
     ["request", "blocks", "num_external_tokens"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "build_connector_meta", ["scheduler_output"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "request_finished", ["request", "block_ids"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "request_finished_all_groups", ["request", "block_ids"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "update_connector_output", ["connector_output"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "get_kv_connector_stats", []),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "get_transfer_results", ["finished_req_ids"]),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "wait_for_save", []),
    (f"{NIXL}/connector.py", "NixlBaseConnector", "shutdown", []),
    (f"{NIXL}/connector.py", "NixlPullConnector", "__init__", ["vllm_config", "role", "kv_cache_config"]),
    (f"{NIXL}/connector.py", "NixlPushConnector", "__init__", ["vllm_config", "role", "kv_cache_config"]),
    (f"{NIXL}/connector.py", "NixlPullConnector", "start_load_kv", ["forward_context"]),
    (f"{NIXL}/connector.py", "NixlPushConnector", "start_load_kv", ["forward_context"]),
    (f"{NIXL}/base_worker.py", "NixlBaseConnectorWorker", "_nixl_handshake",
     ["host", "port", "remote_tp_size", "expected_engine_id"]),
    (f"{NIXL}/pull_worker.py", "NixlPullConnectorWorker", "_read_blocks_for_req", ["req_id", "meta"]),
    (f"{NIXL}/push_worker.py", "NixlPushConnectorWorker", "_do_start_push_kv",
     ["request_id", "local_block_ids", "registration_data"]),
]  # fmt: skip
# (file, class, attributes that its constructor sets)
ATTRIBUTES = [
    (f"{NIXL}/base_worker.py", "NixlBaseConnectorWorker", {"nixl_wrapper", "tp_rank", "device_type"}),
    (f"{NIXL}/connector.py", "NixlBaseConnector", {
        "connector_scheduler", "connector_worker", "kv_transfer_config", "engine_id",
    }),
    (f"{NIXL}/metadata.py", "NixlConnectorMetadata", {
        "reqs_to_recv", "reqs_to_send", "scheduler_clock", "reqs_in_batch", "reqs_not_processed",
        "push_registrations", "push_finished_blocks",
    }),
    ("v1/request.py", "Request", {"request_id", "arrival_time", "num_prompt_tokens", "num_computed_tokens", "status"}),
]  # fmt: skip
AGENT_CALLS = {
    "make_prepped_xfer", "transfer", "check_xfer_state", "release_xfer_handle", "prep_xfer_dlist",
    "release_dlist_handle", "send_notif", "get_new_notifs",
}  # fmt: skip


def trees() -> list[Path]:
    """Return the folders of the vLLM packages to check."""
    named = [Path(each) for each in os.environ.get("KVTRACE_VLLM_TREES", "").split(":") if each]
    found = importlib.util.find_spec("vllm")
    installed = [Path(found.origin).parent] if found is not None and found.origin else []
    return named or installed


@pytest.fixture(params=trees() or [pytest.param(None, marks=pytest.mark.skip(reason="no vLLM here"))], ids=str)
def tree(request: pytest.FixtureRequest) -> Path:
    """Return a vLLM package's folder."""
    return Path(request.param)


def parsed(tree: Path, path: str) -> ast.Module:
    return ast.parse((tree / path).read_text(encoding="utf-8"))


def class_of(tree: Path, path: str, name: str) -> ast.ClassDef:
    return next(node for node in parsed(tree, path).body if isinstance(node, ast.ClassDef) and node.name == name)


def function_of(node: ast.AST, name: str) -> ast.FunctionDef:
    return next(each for each in ast.walk(node) if isinstance(each, ast.FunctionDef) and each.name == name)


def calls(node: ast.AST, holder: str) -> list[str]:
    """Return the methods called on `holder` (an attribute or a variable), in source order."""
    found = [
        (each.lineno, each.func.attr)
        for each in ast.walk(node)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and getattr(each.func.value, "attr", getattr(each.func.value, "id", "")) == holder
    ]
    return [name for _, name in sorted(found)]


def assigned(node: ast.AST) -> set[str]:
    """Return the attributes of self that are assigned anywhere in a class."""
    targets: set[str] = set()
    for each in ast.walk(node):
        for target in getattr(each, "targets", [getattr(each, "target", None)]):
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                targets.add(target.attr)
    return targets


@pytest.mark.parametrize(
    ("path", "owner", "name", "parameters"), METHODS, ids=lambda each: str(each).rpartition("/")[2]
)
def test_a_watched_method_takes_what_its_observer_expects(
    tree: Path, path: str, owner: str, name: str, parameters: list[str]
) -> None:
    arguments = [each.arg for each in function_of(class_of(tree, path, owner), name).args.args[1:]]

    assert arguments[: len(parameters)] == parameters


@pytest.mark.parametrize(("path", "owner", "names"), ATTRIBUTES, ids=[owner for _, owner, _ in ATTRIBUTES])
def test_an_attribute_that_is_read_exists(tree: Path, path: str, owner: str, names: set[str]) -> None:
    assert names - assigned(class_of(tree, path, owner)) == set()


def test_every_listed_private_member_exists(tree: Path) -> None:
    members: dict[str, set[str]] = {}
    for mode, file in (("pull", "pull_worker"), ("push", "push_worker")):
        members[mode] = set()
        for path in (f"{NIXL}/base_worker.py", f"{NIXL}/{file}.py"):
            for node in parsed(tree, path).body:
                if isinstance(node, ast.ClassDef):
                    members[mode] |= assigned(node) | {
                        each.name for each in node.body if isinstance(each, ast.FunctionDef)
                    }

    missing = [(each.name, mode) for each in privates.PRIVATES for mode in each.modes if each.name not in members[mode]]
    assert missing == []


def test_no_private_member_is_used_that_is_not_listed() -> None:
    """Names of vLLM's private members stand in privates.py only, but for the plug-in's own."""
    used: set[str] = set()
    for path in Path(privates.__file__).parent.glob("*.py"):
        if path.name == "plugin.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = getattr(node.value, "id", "")
                if owner not in {"self", "cls"}:
                    used.add(node.attr)

    assert used == set()


def test_the_worker_side_order_is_the_one_that_steps_are_read_by(tree: Path) -> None:
    """Loads, save, results, clearing: each behind the forward, unless the step has loads that must come first."""
    order = calls(function_of(parsed(tree, RUNNER), "_get_kv_connector_output"), "kv_connector")

    assert order[0] == "bind_connector_metadata"
    assert order[1:5] == ["start_load_kv", "start_load_kv", "wait_for_save", "get_transfer_results"]
    assert order[-1] == "clear_connector_metadata"


def test_the_scheduler_asks_for_stats_once_behind_all_else_that_a_result_brings(tree: Path) -> None:
    source = function_of(class_of(tree, SCHEDULER, "Scheduler"), "update_from_output")

    assert calls(source, "connector").count("get_kv_connector_stats") == 1
    assert calls(parsed(tree, SCHEDULER), "connector").count("get_kv_connector_stats") == 1
    order = [name for name in calls(source, "self") if name == "_update_from_kv_xfer_finished"]
    assert order == ["_update_from_kv_xfer_finished"]


def test_a_scheduler_output_says_whether_loads_come_first(tree: Path) -> None:
    fields = {
        each.target.id
        for each in class_of(tree, "v1/core/sched/output.py", "SchedulerOutput").body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }

    assert {"has_sync_kv_loads", "preempted_req_ids", "num_scheduled_tokens", "total_num_scheduled_tokens"} <= fields


def test_the_agent_is_called_as_the_stand_in_expects(tree: Path) -> None:
    used = {
        name
        for path in (tree / NIXL).glob("*.py")
        for name in calls(ast.parse(path.read_text(encoding="utf-8")), "nixl_wrapper")
    }

    assert AGENT_CALLS - used == set()
    assert "initialize_xfer" not in used


def test_registrations_carry_the_two_fields_that_are_read(tree: Path) -> None:
    keys = {
        key.value
        for node in ast.walk(parsed(tree, f"{NIXL}/push_scheduler.py"))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }

    assert {"request_id", "decode_engine_id"} <= keys
    assert 'PUSH_REG_NOTIF_PREFIX = b"PUSH_REG:"' in (tree / NIXL / "metadata.py").read_text(encoding="utf-8")


# Refusal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.0", "v0.33.1.dev4+g12ab", "0.30.0rc1"])
def test_a_release_in_the_range_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTRACE_ALLOW_UNTESTED", raising=False)

    assert versions.problem(version) == ""


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "0.34.0rc1", "1.0.0", "0.3.3", "dev", ""])
def test_a_release_outside_the_range_is_refused_with_the_range_and_a_way_on(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: version)
    monkeypatch.delenv("KVTRACE_ALLOW_UNTESTED", raising=False)
    with pytest.raises(VersionError, match=r"0\.30 to 0\.33.*KVTRACE_ALLOW_UNTESTED=1") as refusal:
        versions.require()
    assert (version or "no vLLM") in str(refusal.value)

    monkeypatch.setenv("KVTRACE_ALLOW_UNTESTED", "1")
    assert versions.require() == version
