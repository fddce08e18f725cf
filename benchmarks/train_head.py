"""Train an MTP head for a target of Llama's kind, from texts that the target writes.

    python benchmarks/train_head.py OUT [--target MODEL] [--texts 2048] [--length 256] [--minutes 60]
    specd up --target MODEL --draft OUT --draft-in-target

The target continues short pieces of `--prompts`, at temperature 1. Then the head learns the target's distributions at
each place of these texts: from the target's states (its first draft token), and from its own (the second and third),
as it drafts. Every eighth text is left out of the training. The script prints the share of their places where the
head's favourite token is the target's, for each draft token. OUT gets the head, in half precision.
"""

from __future__ import annotations

# ruff: noqa: E402 - MLX comes in after its BLAS
import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specd.machine import default_blas_threads
from specd.worker.cpu.openblas import load_blas

load_blas(default_blas_threads())

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from specd.bench.prompts import load_prompts
from specd.settings import EMBEDDED_TARGET
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.mtp import MTPHead
from specd.worker.model.directory import find
from specd.worker.model.head_loader import save_head
from specd.worker.model.loader import read

_DEPTH = 3  # draft tokens to learn
_PIECE = 16  # tokens of a prompt
_TOGETHER = 64  # texts that are written at once
_BATCH = 8  # texts of a training step
_HELD_OUT = 8  # every eighth text is for the test
_LEARNING_RATE = 2e-3


def write_texts(network: Any, pieces: np.ndarray, length: int) -> mx.array:
    """Return texts [n, length] that begin with pieces [n, _PIECE], sampled from the target."""
    texts = []
    for start in range(0, len(pieces), _TOGETHER):
        cache = make_prompt_cache(network)
        latest = mx.array(pieces[start : start + _TOGETHER])
        parts = [latest]
        for _ in range(length - _PIECE):
            latest = mx.random.categorical(network(latest, cache=cache)[:, -1])[:, None]
            mx.async_eval(latest)
            parts.append(latest)
        texts.append(mx.concatenate(parts, axis=1))
        mx.eval(texts[-1])
        print(f"wrote {start + len(pieces[start : start + _TOGETHER])} of {len(pieces)} texts", flush=True)
    return mx.concatenate(texts)


def drafts(head: MTPHead, texts: mx.array, hidden: mx.array) -> Iterator[tuple[int, mx.array]]:
    """Yield the head's logits [texts, places, rows] of each draft token, and how far they are behind the target's."""
    states = hidden
    for depth in range(1, _DEPTH + 1):
        states = head(texts[:, depth:], states[:, :-1], [None])
        yield depth, head.logits(states)


def loss_of(head: MTPHead, texts: mx.array, hidden: mx.array, wanted: mx.array) -> mx.array:
    """Return the mean cross entropy of the head's distributions with the target's [texts, places, rows]."""
    losses = [
        -mx.mean(mx.sum(wanted[:, depth:] * nn.log_softmax(logits, axis=-1), axis=-1))
        for depth, logits in drafts(head, texts, hidden)
    ]
    return sum(losses, start=mx.array(0.0)) / _DEPTH


def agreement(head: MTPHead, texts: mx.array) -> list[float]:
    """Return the share of places, by draft token, where the head's favourite token is the target's."""
    counts = np.zeros(_DEPTH)
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        logits, hidden = _target(head, batch)
        for depth, drafted in drafts(head, batch, hidden):
            same = mx.argmax(drafted, axis=-1) == mx.argmax(logits[:, depth:], axis=-1)
            counts[depth - 1] += float(mx.mean(same.astype(mx.float32))) * len(batch)
    return [round(share, 3) for share in counts / len(texts)]


def _target(head: MTPHead, batch: mx.array) -> tuple[mx.array, mx.array]:
    """Return the target's logits and hidden states, evaluated: no gradient goes through them."""
    logits, hidden = head.states.run(batch, [None] * head.num_target_layers)
    mx.eval(logits, hidden)
    return logits, hidden


def train(head: MTPHead, texts: mx.array, minutes: float) -> None:
    """Train for this long, and print the agreement on the texts that were left out."""
    rows = np.arange(len(texts))
    tests, lessons = texts[mx.array(rows[::_HELD_OUT])], [i for i in rows if i % _HELD_OUT]
    optimizer = optimizers.AdamW(_LEARNING_RATE, weight_decay=0.01)
    step_of = nn.value_and_grad(head, loss_of)
    generator = np.random.default_rng(0)
    begun_at = shown_at = time.perf_counter()
    number, recent = 0, []
    while (past := (time.perf_counter() - begun_at) / (60 * minutes)) < 1:
        optimizer.learning_rate = _LEARNING_RATE * min(1, (number + 1) / 50) * (1 - 0.95 * past)
        batch = texts[mx.array(generator.choice(lessons, _BATCH, replace=False))]
        logits, hidden = _target(head, batch)
        loss, gradients = step_of(head, batch, hidden, mx.softmax(logits, axis=-1))
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(head, gradients)
        mx.eval(head.parameters(), optimizer.state, loss)
        recent.append(float(loss))
        number += 1
        if time.perf_counter() - shown_at > 60:
            print(f"step {number}: loss {np.mean(recent):.3f}, agreement {agreement(head, tests[:32])}", flush=True)
            shown_at, recent = time.perf_counter(), []
    print(f"{number} steps: agreement {agreement(head, tests)}")


def main() -> None:
    """Write texts, train a head, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new directory for the head")
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts")
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--minutes", type=float, default=60, help="time of the training, without writing texts")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    network, config, tokenizer = read(options.target, find(options.target))
    network.set_dtype(mx.float32)  # scales become float32 first, as in a worker on a CPU
    network = dequantize_model(network)
    network.set_dtype(mx.float32)
    network.freeze()
    mx.eval(network.parameters())
    head = MTPHead(network, HiddenStates(network))
    mx.random.seed(0)
    ids = [tokenizer.encode(text) for text in load_prompts(options.prompts).values()]
    starts = np.random.default_rng(0)
    pieces = np.array([_piece(starts, ids) for _ in range(options.texts)])
    texts = write_texts(network, pieces, options.length)
    head.num_target_layers = len(network.layers)
    # The last layer of the target is a good beginning, on the sum of both inputs.
    head.layers[0].update(network.layers[-1].parameters())
    size = head.size
    head.fc.weight = mx.concatenate([mx.eye(size), mx.eye(size)], axis=1) / 2
    train(head, texts, options.minutes)
    head.set_dtype(mx.float16)
    save_head(head, options.out)
    config = {"model_type": f"{config['model_type']}_mtp"}
    (options.out / "config.json").write_text(json.dumps(config))
    weights: Any = tree_flatten(head.parameters())
    num_weights = sum(weight.size for _, weight in weights)
    print(f"{options.out} has a head of {num_weights / 1e6:.1f} million weights")


def _piece(generator: np.random.Generator, ids: list[list[int]]) -> list[int]:
    chosen = ids[generator.integers(len(ids))]
    start = generator.integers(max(len(chosen) - _PIECE, 1))
    piece = chosen[start : start + _PIECE]
    return piece + piece[-1:] * (_PIECE - len(piece))


if __name__ == "__main__":
    main()
