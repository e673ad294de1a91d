"""What the router asks of real engines beyond the plain streamed completion, in either order of dispatch."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from kvtrace.lab import workload
from kvtrace.store import Store
from tests.engine.deployment import Deployment
from tests.waiting import until

pytestmark = pytest.mark.engine

MODES = pytest.mark.parametrize("mode", ["push", "pull"])
PROMPTS = [workload.prompt(3, number, 120) for number in range(3)]


def ask(deployment: Deployment, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"model": deployment.lab.model, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | fields
    return httpx.post(deployment.lab.url + path, json=body, timeout=60, trust_env=False)


def texts(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


@MODES
def test_several_prompts_get_the_answers_that_each_gets_alone(deployment: Deployment) -> None:
    alone = [texts(ask(deployment, prompt=prompt))[0] for prompt in PROMPTS]

    together = texts(ask(deployment, prompt=PROMPTS))

    assert len(set(alone)) == len(PROMPTS)
    assert together == alone


@MODES
def test_chat_says_the_same_streamed_and_whole(deployment: Deployment) -> None:
    chat = {"messages": [{"role": "user", "content": "who waited for whom"}]}

    whole = texts(ask(deployment, "/v1/chat/completions", **chat))[0]
    streamed = ask(deployment, "/v1/chat/completions", **chat, stream=True, stream_options={"include_usage": True})

    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert said == whole != ""
    assert events[-1]["usage"]["completion_tokens"] == 6


@MODES
def test_an_engines_refusal_arrives_as_the_engine_wrote_it(deployment: Deployment) -> None:
    unknown = ask(deployment, prompt="a", model="nobody")
    lengthy = ask(deployment, prompt=[5] * 5_000)

    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    assert (lengthy.status_code, lengthy.json()["error"]["type"]) == (400, "BadRequestError")


@MODES
def test_what_an_engine_refuses_is_one_request_in_the_store(deployment: Deployment) -> None:
    begun_ns = time.time_ns()
    for fields in ({"prompt": "a", "model": "nobody"}, {"prompt": [5] * 5_000}):
        assert ask(deployment, **fields).is_client_error

    def told() -> list[tuple[str, str]]:
        with Store.open(deployment.record(), "read") as store:
            rows = store.rows("SELECT verdict, scope FROM request WHERE start_ns >= $from", {"from": begun_ns})
        return [(row["verdict"], row["scope"]) for row in rows]

    until(lambda: len(told()) >= 2, what="both requests are in the store")
    assert told() == [("failed", "router")] * 2


@MODES
def test_a_client_that_leaves_ends_the_work_of_both_engines(deployment: Deployment) -> None:
    identity, body = f"leaver-{deployment.mode}", {"model": deployment.lab.model, "prompt": PROMPTS[0], "stream": True}
    url, headers = deployment.lab.url + "/v1/completions", {"X-Request-Id": identity}
    body |= {"max_tokens": 2_000, "ignore_eos": True}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60, trust_env=False) as reply:
        assert next(reply.iter_lines()).startswith("data: ")

    def stages() -> set[str]:
        with Store.open(deployment.record(), "read") as store:
            (request,) = store.rows("SELECT * FROM request WHERE client_request_id = $id", {"id": identity})
            assert request["verdict"] == "complete", "its KV was handed over before it left"
            seen = store.rows(
                "SELECT DISTINCT stage::VARCHAR AS stage FROM event WHERE contains(request, $id)",
                {"id": request["request_id"]},
            )
            return {row["stage"] for row in seen}

    wanted = {"router.cancelled", "decode.http_disconnected", "decode.aborted"}
    until(lambda: wanted <= stages(), what=f"the store says {sorted(wanted)}")
    assert not {"router.done", "decode.finished", "decode.http_done"} & stages()
    assert len(texts(ask(deployment, prompt=PROMPTS[0]))) == 1


DURING = {"push": ("decode", "nixl.reads_completion"), "pull": ("decode", "nixl.sees_done")}
"""Where D is about to learn that the KV is there: until then the hand-off is under way for it."""


@MODES
def test_a_client_that_leaves_during_the_transfer_has_a_verdict_and_p_its_blocks_back(deployment: Deployment) -> None:
    identity, body = f"early-leaver-{deployment.mode}", {"model": deployment.lab.model, "prompt": PROMPTS[1]}
    headers = {"X-Request-Id": identity}
    with deployment.faults.on({DURING[deployment.mode]: 2400.0}), pytest.raises(httpx.ReadTimeout):
        httpx.post(
            deployment.lab.url + "/v1/completions", json=body | {"max_tokens": 50, "stream": True}, headers=headers,
            timeout=httpx.Timeout(10, read=1.2), trust_env=False,
        )  # fmt: skip
    rows: list[dict[str, Any]] = []

    def is_settled() -> bool:
        with Store.open(deployment.record(), "read") as store:
            rows[:] = store.rows("SELECT * FROM request WHERE client_request_id = $id", {"id": identity})
        return bool(rows) and rows[0]["held_ns"] is not None and rows[0]["verdict"] == "aborted"

    until(is_settled, what=f"{identity} is aborted and P has let its blocks go")
    (row,) = rows

    assert row["ttft_ns"] is None
    assert row["note"].startswith("the request was aborted before its first token, after ")
    assert (row["transfers"], row["held_blocks"]) == (1, 1)
    assert row["moved_bytes"] > 0
    assert 0 < row["held_ns"] < 30e9
    assert len(texts(ask(deployment, prompt=PROMPTS[1]))) == 1
