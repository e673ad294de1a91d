"""What of a command is kept in a store: everything but its secrets."""

from __future__ import annotations

import json
import shlex
import time

import pytest

from kvtrace.redaction import without_secrets
from tests.waiting import LONG_S


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("vllm serve m --api-key hush --port 8000", "vllm serve m --api-key *** --port 8000"),
        ("vllm serve m --api-key=hush --hf-token=hush", "vllm serve m --api-key=*** --hf-token=***"),
        ("env HF_TOKEN=hush AWS_SECRET_KEY=hush vllm serve m", "env HF_TOKEN=*** AWS_SECRET_KEY=*** vllm serve m"),
        ("run --db-password 'a b' --url http://me:hush@host/x", "run --db-password *** --url http://***@host/x"),
        ("serve m --max-num-batched-tokens 8 --block-size=16", "serve m --max-num-batched-tokens 8 --block-size=16"),
        ("vllm serve m --api-key --port 8000", "vllm serve m --api-key --port 8000"),
        ("", ""),
    ],
)  # fmt: skip
def test_values_of_secrets_are_hidden_and_nothing_else(line: str, kept: str) -> None:
    assert without_secrets(shlex.split(line)) == [word.strip("'") for word in shlex.split(kept)]


def test_a_script_in_one_word_loses_them_too() -> None:
    script = "export HF_TOKEN='hush' && vllm serve m --api-key hush --max-num-batched-tokens 8 & curl http://a:hush@b"

    (kept,) = without_secrets([script])

    assert "hush" not in kept
    assert kept == "export HF_TOKEN=*** && vllm serve m --api-key *** --max-num-batched-tokens 8 & curl http://***@b"


HUSH = "hush"


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "m", "--api-key", "hush", "hush", "--port", "1"],
        ["docker", "run", "--env=HF_TOKEN=hush", "-eAPI_KEY=hush", "-e", "DB_PASSWORD=a hush", "image"],
        ["env", "OTEL_EXPORTER_OTLP_HEADERS=api-key=hush,x=y", "vllm"],
        ["env", "OTEL_EXPORTER_OTLP_HEADERS=Authorization=Basic hush", "vllm"],
        ["curl", "-H", "Authorization: Bearer hush", "-H", "x-api-key: hush", "--header=authorization:hush"],
        ["run", "redis://:hush@host/0", "https://hush@host/x", "https://me:a@hush@host/x", "http://a,http://b:hush@c"],
        ["vllm", "--kv-transfer-config", '{"api_key":"hush","deeper":[{"password":["hush"]},"http://a:hush@b"]}'],
        ["bash", "-lc", "vllm serve m --api-key hush hush --port 1 && curl -H 'Authorization: Bearer hush' http://x"],
        ["bash", "-c", "vllm --x '{\"token\": \"hush\"}' --y \"{\\\"token\\\": \\\"hush\\\"}\" --env=\"KEY=a hush\""],
        ["sh", "-c", shlex.join(["sh", "-c", shlex.join(["sh", "-c", "vllm --hf-token 'a hush' --api-key hush"])])],
        ["ssh", "host", "KEY=hush vllm serve m"],
        ["curl", "-u", "me:hush", "--cookie", "sid=hush", "--oauth2-bearer", "hush", "-H", "Cookie: sid=hush"],
        ["run", "--pw", "hush", "http://h/?sig=hush", '{"env": [{"name": "HF_TOKEN", "value": "hush"}]}'],
        ["run", "hf_" + 4 * "hush", "sk-" + 4 * "hush", "a=eyJhbGciOiJI.eyJzdWIi.hush"],
        ["bash", "-c", "git clone x --with ghp_" + 4 * "hush"],
        ["sh", "-c", "vllm --hf-token \\\n hush --port 1"],
        ["python", "-c", "import os; os.environ['HF_TOKEN']='hush'"],
        ["curl", "-ume:hush", "--user=me:hush", "--proxy-user=me:a:hush"],
        ["bash", "-c", "curl -ume:hush http://h && curl '-ume:a hush' http://h"],
        ["python", "-c", "api_key = 'a hush'; f(token = \"hush\", os.environ['HF_TOKEN'] = 'hush')"],
        ["python", "-c", "post(u, headers={'X-Api-Key': 'hush'}); e = {'a':'b','token': 'hush'}; d['pw']='a hush'"],
        ["bash", "-c", "TOKEN+=hush TOKEN+='a hush' run --token = hush"],
        ["python", "-c", "secret ='hush'\npassword := 'hush'\nx = {'api_key': 'hush', \"token\": 'hush'}"],
        ["bash", "-c", "python - <<'EOF'\nimport x\npassword = 'hush'\nHF_TOKEN='a hush'\nEOF\nvllm serve m"],
        ["bash", "-c", "cat > .env <<EOF\nHF_TOKEN=hush\ndb_password = hush\nEOF"],
        ["run", "--pass", "hush", "--auth=me:hush", "MYSQL_PWD=hush", "--api-keys", "hush", "hush"],
    ],
)  # fmt: skip
def test_no_way_to_give_a_secret_leaves_it_in(argv: list[str]) -> None:
    assert HUSH in " ".join(argv)
    assert HUSH not in " ".join(without_secrets(argv))


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("env -u X task_sk-1 --user me hf_x", "env -u X task_sk-1 --user me hf_x"),
        ("HF_TOKEN=hush vllm serve m --block-size 16", "HF_TOKEN=*** vllm serve m --block-size 16"),
        ("a  && b\t--api-key=hush;\nc 'd e' | f", "a  && b\t--api-key=***\nc 'd e' | f"),
        ('vllm --x \'{"a": 1}\' --y {"max_tokens":2}', 'vllm --x \'{"a": 1}\' --y {"max_tokens":2}'),
        ('x = 1; [ "$key" = a ] && python -url:x -unbuffered', 'x = 1; [ "$key" = a ] && python -url:x -unbuffered'),
        ("if n == 'a': pass", "if n == 'a': pass"),
        ("docker run --user=$(id -u):$(id -g) image", "docker run --user=$(id -u):$(id -g) image"),
        ("python -u a.py {'size': 1, 'keys': 2}", "python -u a.py {'size': 1, 'keys': 2}"),
        ("key = 1\nport = 2", "key = ***\nport = 2"),
        ("it's one \"quote and 'another", "it's one \"quote and 'another"),
    ],
)
def test_what_else_is_in_a_script_stays_as_it_is(word: str, kept: str) -> None:
    assert without_secrets(["bash", "-c", word]) == ["bash", "-c", kept]


def test_json_stays_json() -> None:
    (kept,) = without_secrets(['{"kv_connector": "NixlConnector", "token": "hush"}'])

    assert json.loads(kept) == {"kv_connector": "NixlConnector", "token": "***"}
    assert without_secrets(['{"kv_port":1}']) == ['{"kv_port":1}']


@pytest.mark.parametrize(
    "word",
    ["'" * 100_000, '"' + '\\"' * 60_000 + " x", "a." * 60_000, "key:" * 30_000, '{"a":' * 900 + "1" + "}" * 900],
)
def test_odd_words_take_no_time_and_end_nothing(word: str) -> None:
    started_s = time.monotonic()

    assert len(without_secrets(["bash", "-c", word])) == 3
    assert time.monotonic() - started_s < LONG_S
