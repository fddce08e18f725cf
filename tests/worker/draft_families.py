"""Made-up families of models: a target, the draft that suits it best, one that is too slow, and a foreign one."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from specd.settings import EMBEDDED_TARGET
from tests.worker.models import write_model

SIZE, _INNER, _VOCABULARY, _SPECIAL = 64, 64, 8192, 16
_REAL_LAYERS = 2


@dataclass(frozen=True)
class DraftFamily:
    """The directories of a family's models, and its number.

    The slow draft computes what the target does, in many more layers. The best one is noisy. The foreign one computes
    what the target does, at no cost, but two of its tokens have exchanged their ids.
    """

    number: int
    target: Path
    best: Path
    slow: Path
    foreign: Path


def save_family(directory: Path, number: int) -> DraftFamily:
    """Save a family, with token ids of its own. All its models compute one small network, or nearly."""
    paths = [directory / f"{kind}-{number}" for kind in ("target", "best", "slow", "foreign")]
    family = DraftFamily(number, *paths)
    kind = ("llama", "qwen2", "qwen3")[number % 3]
    small = _network(kind, number, _REAL_LAYERS, _INNER)
    _save(family.target, kind, _grown(small, kind, 3, 12288 + 1024 * (number % 4)), number)
    _save(family.best, kind, _noisy(small, 0.02 + 0.005 * (number % 3)), number)
    _save(family.slow, kind, _grown(small, kind, 96, _INNER), number)
    _save(family.foreign, kind, small, number)
    _swap_two_tokens(family.foreign / "tokenizer.json")
    return family


def _config(kind: str, layers: int, inner: int) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": SIZE,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": _VOCABULARY,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }


def _network(kind: str, seed: int, layers: int, inner: int) -> tuple[dict[str, mx.array], int, int]:
    """Return random weights, the number of layers and their inner size."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    network = module.Model(module.ModelArgs.from_dict(_config(kind, layers, inner)))
    parameters: Any = tree_flatten(network.parameters())
    weights = {
        name: mx.random.normal(weight.shape) / weight.shape[-1] ** 0.5 if weight.ndim > 1 else weight
        for name, weight in parameters
    }
    weights["model.embed_tokens.weight"] = mx.random.normal((_VOCABULARY, SIZE))
    mx.eval(weights)
    return weights, layers, inner


def _grown(
    network: tuple[dict[str, mx.array], int, int], kind: str, layers: int, inner: int
) -> tuple[dict[str, mx.array], int, int]:
    """Return a network that computes the same with more layers, which add nothing, and wider ones."""
    own, num_layers, own_inner = network
    weights, _, _ = _network(kind, 1, layers, inner)
    for name in weights:
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if layer >= num_layers:
            if "o_proj" in name or "down_proj" in name:
                weights[name] = mx.zeros_like(weights[name])
        elif "down_proj.weight" in name:
            weights[name] = mx.pad(own[name], [(0, 0), (0, inner - own_inner)])
        elif "gate_proj.weight" in name or "up_proj.weight" in name:
            weights[name] = mx.concatenate([own[name], weights[name][own_inner:]])
        else:
            weights[name] = own[name]
    return weights, layers, inner


def _noisy(network: tuple[dict[str, mx.array], int, int], noise: float) -> tuple[dict[str, mx.array], int, int]:
    weights, layers, inner = network
    mx.random.seed(2)
    noisy = {
        name: weight + noise * mx.std(weight) * mx.random.normal(weight.shape) if weight.ndim > 1 else weight
        for name, weight in weights.items()
    }
    return noisy, layers, inner


def _save(directory: Path, kind: str, network: tuple[dict[str, mx.array], int, int], number: int) -> None:
    weights, layers, inner = network
    write_model(directory, _config(kind, layers, inner) | {"family": number}, weights, tokenizer_of=EMBEDDED_TARGET)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {token: _own_id(i, number) for token, i in content["model"]["vocab"].items()}
    path.write_text(json.dumps(content))


def _own_id(token_id: int, number: int) -> int:
    """Return the id of a token in a family."""
    if token_id < _SPECIAL:
        return token_id
    return _SPECIAL + (token_id - _SPECIAL + 7 * number) % (_VOCABULARY - _SPECIAL)


def _swap_two_tokens(path: Path) -> None:
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = [token for token in vocabulary if vocabulary[token] >= _SPECIAL][100:102]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(content))
