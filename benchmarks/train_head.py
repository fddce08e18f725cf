"""Train an MTP head for a target of Llama's kind, from texts that the target writes.

    python benchmarks/train_head.py OUT [--target MODEL] [--texts 1024] [--length 256] [--minutes 45]
    specd up --target MODEL --draft OUT --draft-in-target

The target continues short pieces of the source of Python's standard library, at temperatures from 0.3 to 1. Then the
head learns the target's distributions in these texts: from the target's states (its first draft token), and, in the
second half of the time, from its own (the second and third), as it drafts. Every sixteenth text is left out of the
training. The script prints the share of their places where the head's favourite token is the target's, for each draft
token. OUT gets the head, in 8 bit.
"""

from __future__ import annotations

# ruff: noqa: E402 - MLX comes in after its BLAS
import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specd.machine import default_blas_threads
from specd.worker.cpu.openblas import load_blas

load_blas(default_blas_threads())

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from specd.settings import EMBEDDED_TARGET
from specd.worker.cpu.ops import replace_attention, replace_swiglu
from specd.worker.cpu.undo import UnsuitableError
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.mtp import MTPHead
from specd.worker.model.directory import find
from specd.worker.model.head_loader import save_head
from specd.worker.model.loader import read

_DEPTH = 3  # draft tokens to learn
_PIECE = 32  # tokens of a prompt
_TOGETHER = 128  # texts that are written at once
# Texts are trained on in parts of this many tokens, because attention costs less. The target's states still hold the
# whole text before a part.
_PART = 128
_BATCH = 16  # parts of a training step
# A step's loss uses one in four places of a part: the logits of all places would take a third of the time of a step.
_SHARE = 4
_HELD_OUT = 16  # every sixteenth text is for the test
_WARM_UP = 50  # steps
_LEARNING_RATE = 1e-3


class Texts(NamedTuple):
    """Texts of the target, with its states."""

    token_ids: mx.array  # [texts, length]
    hidden: mx.array  # [texts, length, size]

    def some(self, indices: np.ndarray) -> Texts:
        """Return the texts with these indices."""
        return Texts(*(each[mx.array(indices)] for each in self))

    def in_parts(self) -> Texts:
        """Return the parts of the texts."""
        return Texts(self.token_ids.reshape(-1, _PART), self.hidden.reshape(-1, _PART, self.hidden.shape[-1]))


def write_texts(head: MTPHead, pieces: np.ndarray, length: int) -> Texts:
    """Return texts of this length that begin with pieces [n, _PIECE], sampled from the target."""
    written = []
    for start in range(0, len(pieces), _TOGETHER):
        latest = mx.array(pieces[start : start + _TOGETHER])
        temperatures = mx.linspace(0.3, 1, len(latest))[:, None]
        cache = make_prompt_cache(head.states.network)
        token_ids, hidden = [latest], []
        for _ in range(length - _PIECE):
            logits, states = head.states.run(latest, cache)
            hidden.append(states)
            latest = mx.random.categorical(logits[:, -1] / temperatures)[:, None]
            mx.async_eval(latest)
            token_ids.append(latest)
        hidden.append(head.states.run(latest, cache)[1])
        written.append(Texts(mx.concatenate(token_ids, axis=1), mx.concatenate(hidden, axis=1)))
        mx.eval(written[-1])
        print(f"wrote {start + len(latest)} of {len(pieces)} texts", flush=True)
    return Texts(*(mx.concatenate([*parts]) for parts in zip(*written, strict=True)))


def drafts(head: MTPHead, texts: Texts, most: int) -> Iterator[tuple[int, mx.array]]:
    """Yield the head's states [texts, places, size] of each draft token, and how far they are behind the target's."""
    states = texts.hidden
    for depth in range(1, most + 1):
        states = head(texts.token_ids[:, depth:], states[:, :-1], [None])
        yield depth, states


def loss_of(head: MTPHead, texts: Texts, places: mx.array, most: int) -> mx.array:
    """Return the mean cross entropy of the head's distributions with the target's, at some places of each text."""
    loss = mx.array(0.0)
    for depth, states in drafts(head, texts, most):
        wanted = mx.softmax(head.states.logits(texts.hidden[:, places + depth]), axis=-1)
        logits = head.logits(states[:, places])
        loss += mx.mean(mx.logsumexp(logits, axis=-1) - mx.sum(wanted * logits, axis=-1))
    return loss / most


def agreement(head: MTPHead, texts: Texts) -> list[float]:
    """Return the share of places, by draft token, where the head's favourite token is the target's."""
    counts = np.zeros(_DEPTH)
    num_texts = len(texts.token_ids)
    for start in range(0, num_texts, _BATCH):
        batch = texts.some(np.arange(start, min(start + _BATCH, num_texts)))
        for depth, states in drafts(head, batch, _DEPTH):
            of_target = mx.argmax(head.states.logits(batch.hidden[:, depth:]), axis=-1)
            same = mx.argmax(head.logits(states), axis=-1) == of_target
            counts[depth - 1] += float(mx.mean(same.astype(mx.float32))) * len(batch.token_ids)
    return [round(float(share), 3) for share in counts / num_texts]


def train(head: MTPHead, texts: Texts, minutes: float) -> None:
    """Train for this long, and print the agreement on the texts that were left out."""
    is_test = np.arange(len(texts.token_ids)) % _HELD_OUT == 0
    tests, lessons = texts.some(np.flatnonzero(is_test)).in_parts(), texts.some(np.flatnonzero(~is_test)).in_parts()
    rows = np.arange(len(lessons.token_ids))
    num_places = _PART - _DEPTH
    optimizer = optimizers.AdamW(_LEARNING_RATE, weight_decay=0.01)
    step_of = nn.value_and_grad(head, loss_of)
    generator = np.random.default_rng(0)
    begun_at = shown_at = time.perf_counter()
    number, recent = 0, []
    while (past := (time.perf_counter() - begun_at) / (60 * minutes)) < 1:
        optimizer.learning_rate = _LEARNING_RATE * min(1, (number + 1) / _WARM_UP) * (1 - 0.95 * past)
        batch = lessons.some(generator.choice(rows, _BATCH, replace=False))
        places = mx.array(generator.choice(num_places, num_places // _SHARE, replace=False))
        loss, gradients = step_of(head, batch, places, 1 if past < 0.5 else _DEPTH)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(head, gradients)
        mx.eval(head.parameters(), optimizer.state, loss)
        recent.append(float(loss))
        number += 1
        if time.perf_counter() - shown_at > 60:
            some = tests.some(np.arange(min(2 * _BATCH, len(tests.token_ids))))
            print(f"step {number}: loss {np.mean(recent):.3f}, agreement {agreement(head, some)}", flush=True)
            shown_at, recent = time.perf_counter(), []
    print(f"{number} steps: agreement {agreement(head, tests)}")


def main() -> None:
    """Write texts, train a head, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new directory for the head")
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256, help=f"tokens of a text, a multiple of {_PART}")
    parser.add_argument("--minutes", type=float, default=45, help="time of the training, without writing texts")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    network, config, tokenizer = read(options.target, find(options.target))
    network.set_dtype(mx.float32)  # scales become float32 first, as in a worker on a CPU
    network = dequantize_model(network)
    network.set_dtype(mx.float32)
    network.freeze()
    mx.eval(network.parameters())
    with suppress(UnsuitableError):
        replace_attention(network)
        replace_swiglu(network)
    head = MTPHead(network, HiddenStates(network))
    head.num_target_layers = len(network.layers)
    mx.random.seed(0)
    texts = write_texts(head, pieces_of_library(tokenizer, options.texts), options.length)
    # The last layer of the target is a good beginning, on the sum of both inputs.
    head.layers[0].update(network.layers[-1].parameters())
    size = head.size
    head.fc.weight = mx.concatenate([mx.eye(size), mx.eye(size)], axis=1) / 2
    train(head, texts, options.minutes)
    head.set_dtype(mx.float16)
    weights: Any = tree_flatten(head.parameters())
    num_weights = sum(weight.size for _, weight in weights)
    nn.quantize(head, group_size=64, bits=8)
    save_head(head, options.out)
    config = {
        "model_type": f"{config['model_type']}_mtp",
        "hidden_size": size,
        "vocab_size": config["vocab_size"],
        "quantization": {"group_size": 64, "bits": 8},
    }
    (options.out / "config.json").write_text(json.dumps(config, indent=4) + "\n")
    print(f"{options.out} has a head of {num_weights / 1e6:.1f} million weights")


def pieces_of_library(tokenizer: Any, count: int) -> np.ndarray:
    """Return token ids [count, _PIECE] of pieces of Python's standard library, each from the start of a line."""
    generator = np.random.default_rng(0)
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [lines for path in paths if len(lines := path.read_text(encoding="utf-8").splitlines()) > 2 * _PIECE]
    pieces: list[list[int]] = []
    while len(pieces) < count:
        lines = sources[generator.integers(len(sources))]
        start = generator.integers(len(lines) - _PIECE)
        piece = tokenizer.encode("\n".join(lines[start : start + _PIECE]))[:_PIECE]
        pieces += [piece] if len(piece) == _PIECE else []
    return np.array(pieces)


if __name__ == "__main__":
    main()
