"""What rewinding recurrent states costs: rounds whose proposals are accepted in part, and rounds without a rewind.

    python benchmarks/rewinds.py [--models qwen3_5 falcon_h1 …] [-k 3] [--acceptance 0.7] [--rounds 60] [--json FILE]

Networks of mlx-lm's families with random weights, about 100 million of them, in this process, as a worker computes
them. A round feeds k + 1 tokens, evaluates the logits, and goes back to the first token that is rejected, at random. A
token is accepted with the given probability if those before it are. Rounds of both kinds take turns. Medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from specd.worker.cpu.openblas import load_blas

BLAS = load_blas(2)

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from specd.bench.environment import console, environment, new_table  # noqa: E402
from specd.worker.cache.layers.session_layers import SessionLayers  # noqa: E402
from specd.worker.cpu import optimize  # noqa: E402
from specd.worker.engine.cache_users import watch_cache_users  # noqa: E402
from specd.worker.engine.forward import BareCache, Feed, agree, enable_batches, forward, trial_logits  # noqa: E402

VOCABULARY_SIZE = 8192
COMMON = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SSM = {
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 64,
    "mamba_n_heads": 24,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {
            **COMMON,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 12,
            "linear_num_key_heads": 12,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        }
    },
    "falcon_h1": {**COMMON, **SSM, "num_hidden_layers": 8},
    "lfm2": {
        **COMMON,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 768,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention"] * 4,
    },
    "mamba2": {
        **COMMON,
        "num_hidden_layers": 24,
        "num_heads": 24,
        "state_size": 64,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": 48,
    },
}


def make_network(name: str) -> Any:
    """Make a network as a worker has it."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    network = module.Model(module.ModelArgs.from_dict({"model_type": name, **MODELS[name]}))
    mx.eval(network.parameters())
    watch_cache_users(network, by_session=False)
    expected = trial_logits(network, batches=False)
    if mx.default_device().type == mx.cpu:
        optimize(network, VOCABULARY_SIZE, lambda: agree(trial_logits(network, batches=False), expected))
    if not enable_batches(network, expected):
        raise SystemExit(f"{name} cannot compute several sessions at once")
    return network


class Sessions:
    """Some sessions that go on in rounds."""

    def __init__(self, network: Any, count: int, rng: random.Random) -> None:
        """Begin with prompts of 256 tokens."""
        self._rng = rng
        self._caches = [BareCache(network, SessionLayers(network), True) for _ in range(count)]
        for cache in self._caches:
            forward([Feed(cache, mx.array([rng.randrange(VOCABULARY_SIZE) for _ in range(256)]), wants_logits=False)])
            mx.eval(cache.layers.arrays)

    def round(self, k: int, acceptance: float) -> float:
        """Feed k + 1 tokens of each, and go back to what is accepted; return the seconds."""
        feeds = [
            Feed(cache, mx.array([self._rng.randrange(VOCABULARY_SIZE) for _ in range(k + 1)]))
            for cache in self._caches
        ]
        accepted = [next((i for i in range(k) if self._rng.random() >= acceptance), k) for _ in self._caches]
        started_at = time.perf_counter()
        mx.eval(forward(feeds))
        for cache, count in zip(self._caches, accepted, strict=True):
            cache.layers.rewind(cache.layers.num_fed - (k - count))
        return time.perf_counter() - started_at


def measure(name: str, k: int, acceptance: float, num_rounds: int) -> dict[str, float]:
    """Return milliseconds a round: one session without and with rewinds, and eight with."""
    network = make_network(name)
    rng = random.Random(0)
    contenders = {
        "floor": (Sessions(network, 1, rng), 1.0),
        "rewinding": (Sessions(network, 1, rng), acceptance),
        "eight": (Sessions(network, 8, rng), acceptance),
    }
    times: dict[str, list[float]] = {kind: [] for kind in contenders}
    for number in range(num_rounds + 5):
        for kind, (sessions, p) in contenders.items():
            seconds = sessions.round(k, p)
            if number >= 5:
                times[kind].append(1000 * seconds)
    weights: Any = tree_flatten(network.parameters())
    return {
        "million_weights": sum(array.size for _, array in weights) / 1e6,
        **{kind: median(values) for kind, values in times.items()},
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.7, help="probability of each token, after the others")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    results = {
        name: measure(name, options.num_draft_tokens, options.acceptance, options.rounds) for name in options.models
    }
    table = new_table("ms a round", ["weights", "no rewinds", "rewinding", "ratio", "eight sessions", "times one"])
    for name, own in results.items():
        table.add_row(
            name,
            f"{own['million_weights']:.0f} M",
            f"{own['floor']:.1f}",
            f"{own['rewinding']:.1f}",
            f"{own['rewinding'] / own['floor']:.2f}",
            f"{own['eight']:.1f}",
            f"{8 * own['rewinding'] / own['eight']:.2f}",
        )
    console().print(table)
    if options.json is not None:
        about = environment(prompts=[], repeats=options.rounds, max_tokens=0)
        options.json.write_text(json.dumps({"environment": about, "milliseconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
