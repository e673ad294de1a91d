"""The instrumented classes as vLLM itself finds them, and the refusal before vLLM is even loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

FACTORY = """
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
for name in ("NixlConnector", "NixlPullConnector", "NixlPushConnector"):
    config = KVTransferConfig(
        kv_connector=name, kv_role="kv_producer", kv_connector_module_path="instrumented_connectors.nixl"
    )
    found = KVConnectorFactory.get_connector_class(config)
    print(found.__module__, found.__name__, found.__mro__[2].__module__, KVConnectorFactory.supports_hma_config(config))
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


def run(script: str) -> list[str]:
    """Return the lines that a script prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(("instrumented", "VersionError"))]


def test_vllms_factory_takes_the_classes_under_vllms_own_names() -> None:
    stock = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"

    assert run(FACTORY) == [
        f"instrumented_connectors.nixl NixlPullConnector {stock} True",
        f"instrumented_connectors.nixl NixlPullConnector {stock} True",
        f"instrumented_connectors.nixl NixlPushConnector {stock} True",
    ]


def test_a_release_outside_the_range_is_refused_before_vllm_is_loaded() -> None:
    [line] = run(REFUSAL)

    assert line.startswith("VersionError False ")
    assert "0.30 to 0.33" in line
