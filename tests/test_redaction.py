"""What of a command is kept in a store: everything but its secrets."""

from __future__ import annotations

import shlex

import pytest

from kvtrace.redaction import without_secrets


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
