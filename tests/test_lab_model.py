"""The tiny model: the same everywhere, and made so that a wrong hand-off shows."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvtrace.lab import model

tokenizers = pytest.importorskip("tokenizers")


def test_two_builds_are_the_same_byte_for_byte(tmp_path: Path) -> None:
    one, other = model.build(tmp_path / "one"), model.build(tmp_path / "other")

    assert one.name == other.name
    names = sorted(path.name for path in one.iterdir())
    assert "model.safetensors" in names
    assert [(one / name).read_bytes() for name in names] == [(other / name).read_bytes() for name in names]


def test_a_second_build_writes_nothing(tmp_path: Path) -> None:
    folder = model.build(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    assert model.build(tmp_path) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_builds_at_the_same_time_leave_one_whole_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: model.build(tmp_path), range(4)))

    assert list(tmp_path.iterdir()) == list(folders)


def test_the_cache_is_the_users_and_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert model.build().parent == tmp_path / "kvtrace"


def test_every_token_that_can_be_sampled_is_visible_text_and_no_other_has_a_logit(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    folder = model.build(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = load_file(folder / "model.safetensors")["lm_head.weight"]

    sampled = [token for token in range(model.VOCABULARY) if np.any(rows[token])]
    assert len(sampled) > 95
    assert all(tokenizer.decode([token]).isprintable() and tokenizer.decode([token]) for token in sampled)
    assert not any(np.any(rows[tokenizer.token_to_id(name)]) for name in model._SPECIAL)


def test_any_text_makes_the_round_trip(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(model.build(tmp_path) / "tokenizer.json"))
    text = "where did the time go? Æther, 時間, \x00\n"

    assert tokenizer.get_vocab_size() == model.VOCABULARY
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_has_a_template(tmp_path: Path) -> None:
    config = json.loads((model.build(tmp_path) / "tokenizer_config.json").read_text())

    assert "<|im_start|>assistant" in config["chat_template"]
