"""The plug-in entry point, against the registry of the vLLM that is installed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from instrumented_connectors import plugin, versions
from kvtrace import emit

if TYPE_CHECKING:
    from pathlib import Path

# Everything about the real registry in one process, since importing vLLM takes seconds.
REAL = """
import gc, json, sys
gc.disable()  # a quarter of the time that importing vLLM takes
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as Factory
from vllm.config import KVTransferConfig
before = dict(Factory._registry)

from vllm.plugins import load_general_plugins
load_general_plugins()
from instrumented_connectors import plugin
first = dict(Factory._registry)
plugin.register()
plugin.register()

def module(name):
    return Factory.get_connector_class_by_name(name).__module__

children = [{"kv_connector": name, "kv_role": "kv_both"} for name in plugin.NAMES]
def config(name, **more):
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **more)

multi = config("MultiConnector", kv_connector_extra_config={"connectors": children})
Multi = Factory.get_connector_class(multi)
pairs = Multi._get_connector_classes_and_configs(SimpleNamespace(kv_transfer_config=multi))

seen = {
    "changed": sorted(name for name in before if Factory._registry[name] is not before[name]),
    "again": Factory._registry == first,
    "modules": {name: module(name) for name in plugin.NAMES},
    "plain": Factory.get_connector_class(config("NixlPushConnector")).__module__,
    "named": Factory.get_connector_class(
        config("NixlPushConnector", kv_connector_module_path="instrumented_connectors.nixl")).__module__,
    "multi": Multi.__module__,
    "children": [cls.__module__ for cls, _ in pairs],
    "lineage": {},
}
for name in ("NixlConnector", "NixlPullConnector", "NixlPushConnector"):
    explicit = config(name, kv_connector_module_path="instrumented_connectors.nixl")
    cls = Factory.get_connector_class(explicit)
    seen["lineage"][name] = [cls.__name__, cls.__mro__[2].__module__, Factory.supports_hma_config(explicit)]
sys.modules["instrumented_connectors.nixl"] = None
seen["fallback"] = {name: module(name) for name in plugin.NAMES}
print(json.dumps(seen))
"""

REFUSAL = """
import sys
from instrumented_connectors import versions
versions.installed = lambda: "0.29.0"
try:
    import instrumented_connectors.nixl
except Exception as error:
    print(type(error).__name__, "vllm" in sys.modules, error)
"""

INSTRUMENTED = "instrumented_connectors.nixl"
STOCK = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the real registry gives with tracing switched on."""
    pytest.importorskip("vllm")
    environment = {**os.environ, "KVTRACE_SPOOL": str(tmp_path_factory.mktemp("spool"))}
    ended = subprocess.run([sys.executable, "-c", REAL], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def test_vllms_own_names_load_the_instrumented_classes_and_no_other_name_changes(seen: dict[str, Any]) -> None:
    assert seen["changed"] == sorted(plugin.NAMES)
    assert seen["modules"] == dict.fromkeys(plugin.NAMES, INSTRUMENTED)
    assert seen["plain"] == seen["named"] == INSTRUMENTED


def test_vllms_factory_takes_the_classes_by_their_module(seen: dict[str, Any]) -> None:
    assert seen["lineage"] == {
        "NixlConnector": ["NixlPullConnector", STOCK, True],
        "NixlPullConnector": ["NixlPullConnector", STOCK, True],
        "NixlPushConnector": ["NixlPushConnector", STOCK, True],
    }


def test_registering_again_changes_nothing(seen: dict[str, Any]) -> None:
    assert seen["again"] is True


def test_children_of_a_multi_connector_are_instrumented_and_it_is_not(seen: dict[str, Any]) -> None:
    assert seen["multi"].startswith("vllm.")
    assert seen["children"] == [INSTRUMENTED] * len(plugin.NAMES)


def test_vllms_own_classes_are_loaded_where_the_instrumented_ones_cannot_be(seen: dict[str, Any]) -> None:
    assert seen["fallback"] == dict.fromkeys(plugin.NAMES, STOCK)


def test_the_switch_is_the_emitters() -> None:
    """The plug-in spells the variable itself, since it may import nothing where that is not set."""
    assert plugin._SPOOL_VARIABLE == emit.SPOOL_VARIABLE


def test_a_release_outside_the_range_is_refused_before_vllm_is_loaded() -> None:
    ended = subprocess.run([sys.executable, "-c", REFUSAL], capture_output=True, text=True, check=True)

    assert ended.stdout.startswith("VersionError False ")
    assert "0.30 to 0.33" in ended.stdout


def test_switched_off_it_imports_nothing() -> None:
    script = (
        "import sys; from instrumented_connectors import plugin; before = set(sys.modules); plugin.register();"
        "print(sorted(set(sys.modules) - before), [n for n in sys.modules if n.startswith(('vllm', 'kvtrace.'))])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KVTRACE_SPOOL"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "[] []\n"


def test_a_vllm_outside_the_range_is_said_in_one_line_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVTRACE_SPOOL", str(tmp_path))
    monkeypatch.delenv("KVTRACE_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(versions, "installed", lambda: "0.29.1")
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = caplog.records
    assert "0.29.1" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_whatever_goes_wrong_it_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVTRACE_SPOOL", str(tmp_path))
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "not instrumented" in caplog.text
