"""The lab's own promises on real engines: answers that tell hand-offs apart, and that a hand-off does not change."""

from __future__ import annotations

import httpx
import pytest

from kvtrace.lab import metrics, workload
from kvtrace.report import totals
from kvtrace.store import Store
from tests.asked import ask
from tests.engine.deployment import Deployment
from tests.waiting import until

pytestmark = pytest.mark.engine
PROMPTS = 10


def _alone(deployment: Deployment, load: dict[str, object]) -> list[tuple[int, ...]]:
    """Return the answers that prompts get from one engine, one at a time, with no hand-off."""
    url = deployment.lab.engines[1].url
    result = workload.run(url, quiet=True, concurrency=1, rate_qps=float("inf"), **load)
    assert len(result.completed) == load["requests"]
    return [record.token_ids for record in result.records]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_answers_depend_on_the_prompt_and_not_on_the_hand_off(deployment: Deployment) -> None:
    load = {"requests": PROMPTS, "input_len": 200, "output_len": 8, "seed": 5}

    handed_over = workload.run(deployment.lab.url, quiet=True, rate_qps=8.0, **load)

    assert [record.error for record in handed_over.records] == [""] * PROMPTS
    assert [record.token_ids for record in handed_over.records] == _alone(deployment, load)
    assert len({record.token_ids for record in handed_over.records}) >= 8


def _leave_while_the_engine_finishes(deployment: Deployment) -> None:
    """Send a request of one token whose client leaves when D's core has finished it and holds its output back."""
    body = {"model": deployment.lab.model, "prompt": "left", "max_tokens": 1, "ignore_eos": True, "stream": True}
    with deployment.faults.on({("decode", "core.sends_output"): 2400.0}), pytest.raises(httpx.ReadTimeout):
        httpx.post(
            deployment.lab.url + "/v1/completions", json=body,
            timeout=httpx.Timeout(10, read=1.2), trust_env=False,
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_vllms_own_totals_are_those_of_the_store(deployment: Deployment) -> None:
    """Since the engines started: every request, prompt token, transfer and byte is in both, or a reason is known."""
    driver = {"push": "prefill", "pull": "decode"}[deployment.mode]
    deployment.send("counted", prompt_tokens=100)
    _leave_while_the_engine_finishes(deployment)
    said = metrics.read(deployment.lab.engines)
    with Store.open(deployment.record(), "read") as store:
        found = totals.totals(store, totals.facts(said))
    by_name = {(one.engine.rpartition("-")[0].rpartition("-")[2], one.name): one for one in found}

    assert {engine for engine, _ in by_name} == {"prefill", "decode"}
    assert [one for one in found if not one.is_explained] == []
    assert [one for one in found if one.vllm is None] == []
    for name in ("transfers", "bytes"):
        assert by_name[driver, name].agrees
        assert by_name[driver, name].kvtrace > 0
    leaves = "vLLM does not count a request whose client leaves"
    assert by_name["decode", "requests finished"].why.startswith(leaves)
    of_p = by_name["prefill", "requests finished"]  # whom other tests of this lab let leave P
    assert of_p.agrees or of_p.why.startswith(leaves)
    for engine in ("prefill", "decode"):
        assert by_name[engine, "prompt tokens"].kvtrace > 0


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_engines_state_their_limits_and_the_ways_of_their_bytes(deployment: Deployment) -> None:
    """By vLLM's own word for its blocks; what D counts as cached and as P's are the prompt's tokens."""
    deployment.send("stated", prompt_tokens=100)
    path = deployment.record()
    found = {row["engine"]: row for row in ask(path, "engines")}

    for engine in deployment.lab.engines:
        row = found[engine.engine_id]
        said = httpx.get(f"{engine.url}/metrics", timeout=10, trust_env=False).text
        assert f'num_gpu_blocks="{row["kv_blocks"]}"' in said
        assert (row["max_num_seqs"], row["nixl_backends"], row["ucx_tls"]) == (16, "UCX", "tcp,self,sm")
        assert row["max_num_batched_tokens"] >= 1024
    # Cores are looked at within a second of a step.
    until(lambda: {row["engine"] for row in ask(deployment.record(), "cores")} == set(found))
    (answer,) = deployment.answers()["stated"]
    prompt_tokens, cached, remote = (answer.row[f"{name}_tokens"] for name in ("prompt", "cached", "remote"))
    assert cached == 0
    assert 0 <= prompt_tokens - remote <= 1


@pytest.mark.parametrize("mode", ["pull"])
def test_a_transfer_id_is_seen_on_both_legs(deployment: Deployment) -> None:
    """Sent in kv_transfer_params as newer routers do, under ids that have nothing in common."""
    body = {"model": deployment.lab.model, "prompt": "named", "max_tokens": 1, "ignore_eos": True}
    params: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1"}
    for name, engine in zip(("one", "other"), deployment.lab.engines, strict=True):
        reply = httpx.post(
            f"{engine.url}/v1/completions", json=body | {"kv_transfer_params": params}, headers={"x-request-id": name},
            timeout=30, trust_env=False,
        )  # fmt: skip
        assert reply.status_code == 200
        params = {**(reply.json().get("kv_transfer_params") or {}), "transfer_id": "t-1"}
    with Store.open(deployment.record(), "read") as store:
        rows = store.rows("SELECT stage::VARCHAR AS stage, request FROM event WHERE ref = 't-1' ORDER BY t_ns")

    assert [row["stage"] for row in rows] == ["prefill.allocated", "decode.allocated"]
    assert ["one" in rows[0]["request"], "other" in rows[1]["request"]] == [True, True]
