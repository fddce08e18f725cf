"""Train an EAGLE-3 head for a target, from a draft of Llama's kind with the same tokenizer.

    python benchmarks/train_head.py OUT [--target MODEL] [--draft MODEL] [--texts 2048] [--minutes 40]
    specd up --target MODEL --draft OUT --draft-in-target

The head begins with the draft's embedding, its output layer and its last layer; it learns to read the target's hidden
states in the place of the draft's other layers. The lessons are pieces of the files of Python and of the installed
packages, half of them Python's source, and texts that the target writes behind such pieces: half of them greedily,
because a small target's greedy text repeats itself, which the files do not show. The head learns the target's
distributions: in the first half of the time for its first draft token, which follows a state of the target, and then
for the next ones, too, which follow its own states. The last line has the share of its tried draft tokens that the
target accepts in greedy texts that were left out. OUT gets the head, in 8 bit.
"""

from __future__ import annotations

# ruff: noqa: E402 - MLX comes in after its BLAS
import argparse
import json
import sysconfig
import time
from collections import defaultdict
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

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.worker.cpu.ops import replace_attention, replace_swiglu
from specd.worker.cpu.undo import UnsuitableError
from specd.worker.heads.eagle3 import Eagle3Head
from specd.worker.heads.hidden import HiddenStates
from specd.worker.model.directory import find
from specd.worker.model.loader import read

_DEPTH = 3  # draft tokens to learn
_LENGTH = 256  # tokens of a text
_PIECE = 64  # tokens of a piece that the target continues
_TOGETHER = 64  # texts that are written at once
_TESTS = 32  # greedy texts that are left out
_BATCH = 4  # texts of a training step
# A step's loss uses one in four places of a text: the logits of all places would take most of the time of a step.
_SHARE = 4
_WARM_UP = 100  # steps
_LEARNING_RATE = 2e-3
_SUFFIXES = {
    f".{name}" for name in ("c", "css", "csv", "h", "html", "js", "json", "md", "py", "pyi", "rst", "sh", "toml", "txt")
}
_SIZES = range(2_000, 200_000)  # bytes of a file: shorter ones hold no piece, and longer ones are often data


class Texts(NamedTuple):
    """Texts with the target's hidden states: of the layers that the head reads, and of the last one."""

    token_ids: mx.array  # [texts, length]
    hidden: mx.array  # [texts, length, size of all states], float16

    def some(self, indices: np.ndarray | slice) -> Texts:
        """Return the texts with these indices."""
        rows = indices if isinstance(indices, slice) else mx.array(indices)
        return Texts(*(each[rows] for each in self))


class _ChainRows:
    """A layer's rows of all places at once, as a cache of mlx-lm. Each pass adds a draft token at each place.

    In the first pass, a place reads the pairs of the text up to its own. In a later one, it reads the same pairs, and
    behind them the rows of its own draft tokens. So the head learns what it computes in a session.
    """

    def __init__(self) -> None:
        self.offset = -1  # of the first place of a pass: a draft token has the position behind the one before it
        self._rows: list[tuple[mx.array, mx.array]] = []

    def make_mask(self, num_places: int, **_: Any) -> mx.array:
        """Return which rows [places, rows] a pass reads."""
        self.offset += 1
        places = mx.arange(num_places)[:, None]
        of_text, *of_drafts = [mx.arange(keys.shape[2]) for keys, _ in self._rows] + [mx.arange(num_places)]
        return mx.concatenate([of_text <= places, *(rows == places for rows in of_drafts)], axis=1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add the rows [texts, heads, places, size] of a pass, and return all rows."""
        self._rows.append((keys, values))
        all_keys, all_values = zip(*self._rows, strict=True)
        return mx.concatenate([*all_keys], axis=2), mx.concatenate([*all_values], axis=2)


class Lessons:
    """A target's texts, and the head that learns them."""

    def __init__(self, network: Any, draft: Any, config: dict[str, Any]) -> None:
        """Make a head with the weights of the draft's last layer and of both its ends."""
        num_layers = len(network.layers)
        self.network = network
        layers = [2, num_layers // 2, num_layers - 1]
        # The head is not quantised yet, and its layer has no window.
        own = {name: value for name, value in config.items() if "quantization" not in name and name != "layer_types"}
        self.config = {
            **own,
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "draft_vocab_size": config["vocab_size"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
        }
        self.head = head = Eagle3Head(self.config, network, ("embed_tokens.weight", "lm_head.weight"))
        self._states = HiddenStates(network, [*layers, num_layers])
        first, last, layer = draft.layers[0], draft.layers[-1], head.layers[0]
        head.embed_tokens.weight = draft.model.embed_tokens.weight
        head.lm_head.weight = getattr(draft, "lm_head", draft.model.embed_tokens).weight
        head.norm.weight = draft.model.norm.weight
        head.fc.weight = mx.random.normal(head.fc.weight.shape) * 0.01
        layer.mlp.update(last.mlp.parameters())
        layer.self_attn.o_proj.update(last.self_attn.o_proj.parameters())
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(last.self_attn, name).weight
            getattr(layer.self_attn, name).weight = mx.concatenate([weight, weight], axis=1) / 2**0.5
        layer.input_layernorm.weight = first.input_layernorm.weight
        layer.hidden_norm.weight = last.input_layernorm.weight
        layer.post_attention_layernorm.weight = last.post_attention_layernorm.weight

    def read(self, token_ids: np.ndarray) -> Texts:
        """Return texts [n, length] with the target's states."""
        hidden = []
        for start in range(0, len(token_ids), _BATCH):
            batch = mx.array(token_ids[start : start + _BATCH])
            hidden.append(self._states.run(batch, make_prompt_cache(self.network))[1].astype(mx.float16))
            mx.eval(hidden[-1])
        return Texts(mx.array(token_ids), mx.concatenate(hidden))

    def write(self, pieces: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
        """Return texts [n, length] of the target that begin with pieces [n, _PIECE]."""
        written = []
        for start in range(0, len(pieces), _TOGETHER):
            latest = mx.array(pieces[start : start + _TOGETHER])
            heat = mx.array(temperatures[start : start + _TOGETHER])[:, None]
            cache = make_prompt_cache(self.network)
            token_ids = [latest]
            for _ in range(_LENGTH - _PIECE):
                logits = self.network(latest, cache=cache)[:, -1]
                latest = mx.argmax(logits + heat * mx.random.gumbel(logits.shape), axis=-1)[:, None]
                mx.async_eval(latest)
                token_ids.append(latest)
            written.append(np.array(mx.concatenate(token_ids, axis=1)))
            print(f"wrote {start + len(latest)} of {len(pieces)} texts", flush=True)
        return np.concatenate(written)

    def drafts(self, head: Eagle3Head, texts: Texts, most: int) -> Iterator[tuple[int, mx.array]]:
        """Yield the head's states [texts, places, size] of each draft token, and how far they are behind the text."""
        states = head.fuse(texts.hidden[..., : head.states.size])
        rows = _ChainRows()
        for depth in range(1, most + 1):
            states = head(texts.token_ids[:, depth:], states[:, :-1], [rows])
            yield depth, states

    def logits_of_target(self, texts: Texts, places: mx.array | slice) -> mx.array:
        """Return the target's logits at these places of each text."""
        last = texts.hidden[:, places, self.head.states.size :].astype(self._states.dtype)
        return self._states.logits(self.network.model.norm(last))

    def loss_of(self, head: Eagle3Head, texts: Texts, places: mx.array, most: int) -> mx.array:
        """Return the mean cross entropy of the head's distributions with the target's, at some places of each text."""
        loss = mx.array(0.0)
        for depth, states in self.drafts(head, texts, most):
            wanted = mx.softmax(self.logits_of_target(texts, places + depth), axis=-1)
            logits = head.logits(states[:, places])
            loss += mx.mean(mx.logsumexp(logits, axis=-1) - mx.sum(wanted * logits, axis=-1))
        return loss / most

    def accepted_of_tried(self, texts: Texts) -> list[float]:
        """Return by draft token the share that the target accepts in greedy texts, if it accepts those before it."""
        tried, accepted = np.zeros(_DEPTH), np.zeros(_DEPTH)
        for start in range(0, len(texts.token_ids), _BATCH):
            batch = texts.some(slice(start, start + _BATCH))
            is_tried: mx.array | None = None
            for depth, states in self.drafts(self.head, batch, _DEPTH):
                places = slice(_PIECE, states.shape[1] - _DEPTH + depth)
                wanted = mx.argmax(self.logits_of_target(batch, slice(_PIECE + depth, None)), axis=-1)
                same = mx.argmax(self.head.logits(states[:, places]), axis=-1) == wanted[:, : _LENGTH - _PIECE - _DEPTH]
                is_tried = mx.ones_like(same) if is_tried is None else is_tried
                tried[depth - 1] += mx.sum(is_tried).item()
                is_tried &= same
                accepted[depth - 1] += mx.sum(is_tried).item()
        return [round(float(share), 3) for share in accepted / tried]

    def train(self, lessons: Texts, tests: Texts, minutes: float) -> None:
        """Train for this long, and print how much is accepted in tests."""
        optimizer = optimizers.AdamW(_LEARNING_RATE, betas=[0.9, 0.95], weight_decay=0.01)
        step_of = nn.value_and_grad(self.head, self.loss_of)
        generator = np.random.default_rng(0)
        num_places = _LENGTH - _DEPTH
        begun_at = shown_at = time.perf_counter()
        number, recent = 0, []
        while (past := (time.perf_counter() - begun_at) / (60 * minutes)) < 1:
            optimizer.learning_rate = _LEARNING_RATE * min(1, (number + 1) / _WARM_UP) * (1 - 0.95 * past)
            batch = lessons.some(generator.choice(len(lessons.token_ids), _BATCH, replace=False))
            places = mx.array(generator.choice(num_places, num_places // _SHARE, replace=False))
            loss, gradients = step_of(self.head, batch, places, 1 if past < 0.5 else _DEPTH)
            gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
            optimizer.update(self.head, gradients)
            mx.eval(self.head.parameters(), optimizer.state, loss)
            recent.append(float(loss))
            number += 1
            if time.perf_counter() - shown_at > 60:
                some = self.accepted_of_tried(tests.some(slice(_TESTS // 4)))
                print(f"step {number}: loss {np.mean(recent):.3f}, accepted of tried {some}", flush=True)
                shown_at, recent = time.perf_counter(), []
        epochs = number * _BATCH / len(lessons.token_ids)
        print(f"{number} steps, {epochs:.1f} epochs: accepted of tried {self.accepted_of_tried(tests)}")

    def save(self, out: Path) -> None:
        """Write the head, in 8 bit."""
        self.head.set_dtype(mx.float16)
        nn.quantize(self.head, group_size=64, bits=8)
        tensors: Any = tree_flatten(self.head.parameters())
        mx.save_safetensors(str(out / "model.safetensors"), dict(tensors), {"format": "mlx"})
        config = {**self.config, "quantization": {"group_size": 64, "bits": 8}}
        (out / "config.json").write_text(json.dumps(config, indent=4) + "\n")


def in_float32(name: str) -> tuple[Any, dict[str, Any], Any]:
    """Return a model with weights that are not quantised, its configuration and its tokenizer."""
    network, config, tokenizer = read(name, find(name))
    network.set_dtype(mx.float32)  # scales become float32 first, as in a worker on a CPU
    network = dequantize_model(network)
    network.set_dtype(mx.float32)
    network.freeze()
    mx.eval(network.parameters())
    with suppress(UnsuitableError):
        replace_attention(network)
        replace_swiglu(network)
    return network, config, tokenizer


def pieces_of_files(tokenizer: Any, count: int, length: int, seed: int) -> np.ndarray:
    """Return token ids [count, length] of pieces of files, each from the start of a line; half are Python's source."""
    by_suffix: dict[str, list[Path]] = defaultdict(list)
    for root in dict.fromkeys(map(sysconfig.get_path, ("stdlib", "purelib"))):
        for path in sorted(Path(root).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file() and path.stat().st_size in _SIZES:
                by_suffix[path.suffix].append(path)
    others = sorted(by_suffix.keys() - {".py"})
    generator = np.random.default_rng(seed)
    pieces: list[list[int]] = []
    while len(pieces) < count:
        paths = by_suffix[".py" if len(pieces) % 2 else others[generator.integers(len(others))]]
        lines = paths[generator.integers(len(paths))].read_text(errors="replace").splitlines(keepends=True)
        start = generator.integers(len(lines))
        piece = tokenizer.encode("".join(lines[start : start + length])[: 6 * length])[:length]
        pieces += [piece] if len(piece) == length else []
    return np.array(pieces)


def main() -> None:
    """Write texts, train a head, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new directory for the head")
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--draft", default=EMBEDDED_DRAFT, help="the model with which the head begins")
    parser.add_argument("--texts", type=int, default=2048, help="pieces of files; the target writes half as many texts")
    parser.add_argument("--minutes", type=float, default=40, help="time of the training, without the texts")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    mx.random.seed(0)
    network, _, tokenizer = in_float32(options.target)
    draft, config, _ = in_float32(options.draft)
    lessons = Lessons(network, draft, config)
    pieces = pieces_of_files(tokenizer, _TESTS + options.texts // 2, _PIECE, seed=0)
    temperatures = np.where(np.arange(len(pieces)) % 2, np.linspace(0.3, 1, len(pieces)), 0)
    temperatures[:_TESTS] = 0
    written = lessons.write(pieces, temperatures)
    texts = lessons.read(np.concatenate([written, pieces_of_files(tokenizer, options.texts, _LENGTH, seed=1)]))
    lessons.train(texts.some(slice(_TESTS, None)), texts.some(slice(_TESTS)), options.minutes)
    lessons.save(options.out)


if __name__ == "__main__":
    main()
