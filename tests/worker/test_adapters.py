"""Adapters beside one base model: the logits of each are those of mlx-lm's own network with it, in every mixture."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from specd.errors import StartupError
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_DRAFT
from specd.vocabulary import OWN_HEAD
from specd.worker.engine.engine import Engine
from specd.worker.engine.forward import bare_cache, enable_batches, forward
from specd.worker.engine.jobs import Feed, Steps
from specd.worker.engine.static_step import StaticStep
from specd.worker.layers.full import QuantizedCache
from specd.worker.loading import _beside_adapters
from specd.worker.model.adapter_files import read_adapters
from specd.worker.model.adapters import Adapter, _copied, check_logits
from specd.worker.model.loader import LoadedModel, load
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache
from tests.worker.adapter_directories import QUERIES_AND_VALUES, adapted_by_mlx_lm, save_adapter
from tests.worker.driving import Chunks, finish
from tests.worker.families import make_network
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.whole_buffers import whole_buffers

CHUNK = Chunks(16)
# The base, and adapters of other layers and ranks.
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"seed": 1, "keys": QUERIES_AND_VALUES},
    "linear": {"seed": 2, "rank": 4, "size": 0.02},
    "last": {"seed": 3, "rank": 1, "num_layers": 1, "size": 0.2},
    "embedding": {"seed": 4, "rank": 16, "keys": ["model.embed_tokens", "mlp.down_proj"], "size": 0.01},
}
NAMES = ["", *ADAPTERS]


@dataclass(frozen=True)
class Served:
    """A loaded model, and mlx-lm's own network for the base, "", and for each adapter."""

    model: LoadedModel
    expected: dict[str, Any]

    def cache(self, adapter: str, prefixes: PrefixCache | None = None) -> SessionCache:
        cache = SessionCache(self.model, prefixes)
        if adapter:
            cache.choose(adapter)
        return cache

    def logits(self, adapter: str, token_ids: Sequence[int]) -> np.ndarray:
        return np.array(self.expected[adapter](mx.array([[*token_ids]]))[0])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("adapters")
    directories = {name: save_adapter(root / name, EMBEDDED_DRAFT, **made) for name, made in ADAPTERS.items()}
    files = read_adapters(",".join(f"{name}={path}" for name, path in directories.items()), EMBEDDED_DRAFT)
    model = load(EMBEDDED_DRAFT, blas="", is_optimized=True, adapters=files)
    expected = {name: adapted_by_mlx_lm(EMBEDDED_DRAFT, directories.get(name, "")) for name in NAMES}
    return Served(model, expected)


def request(cache: SessionCache, position: int, token_ids: Sequence[int]) -> Steps[np.ndarray]:
    """Hold the first tokens, append others, and return the logits after the last ones."""
    fed = yield from cache.prefill(position, token_ids, CHUNK)
    logits = yield from cache.feed(mx.array(fed))
    cache.commit(fed)
    return np.array(logits)


def check(served: Served, cache: SessionCache, logits: np.ndarray) -> None:
    expected = served.logits(cache.adapter, cache.token_ids)[-len(logits) :]
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def some_tokens(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(8192) for _ in range(n)]


# -- Logits


def test_every_adapter_gives_other_tokens(served: Served) -> None:
    """Without this, the tests here would show nothing."""
    tokens = some_tokens(random.Random(0), 40)
    choices = {name: served.logits(name, tokens).argmax(axis=-1) for name in NAMES}
    for name, own in choices.items():
        for other, others in choices.items():
            assert name == other or (own != others).mean() > 0.3, f"{name} and {other}"


@pytest.mark.parametrize("name", NAMES)
def test_each_width_gives_the_logits_of_mlx_lm_also_after_rewinds(served: Served, name: str) -> None:
    draw, cache = random.Random(name), served.cache(name)
    finish(request(cache, 0, some_tokens(draw, 50)))
    for width in (*range(1, 9), *range(8, 0, -1), 40):
        position = draw.randint(20, cache.cached_len)
        check(served, cache, finish(request(cache, position, some_tokens(draw, width))))


def test_the_weights_of_the_base_are_in_memory_once(served: Served) -> None:
    base = {id(array) for array in arrays_in(served.model.network).values()}
    plain = {id(part.plain[name].weight) for part in _mlps(served.model.network) for name in part.plain}
    for adapted in served.model.adapters.values():
        for name, array in arrays_in(adapted.network).items():
            assert name.endswith(("lora_a", "lora_b")) or id(array) in base | plain, name


def arrays_in(network: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(network.parameters()))


def _mlps(network: Any) -> list[Any]:
    return [part for part in network.modules() if hasattr(part, "plain")]


# -- Mixtures


async def test_sessions_with_other_adapters_are_computed_at_once(tmp_path: Path) -> None:
    """Two adapters and the base, three sessions each, with widths of 1 to 8 and rewinds, on one engine's thread."""
    directories = {
        name: save_adapter(tmp_path / name, EMBEDDED_DRAFT, seed=seed) for seed, name in enumerate(("a", "b"))
    }
    files = read_adapters(",".join(f"{name}={path}" for name, path in directories.items()), EMBEDDED_DRAFT)
    steps: list[tuple[int, int]] = []
    engine = Engine(mx.clear_streams)
    engine.on_step = lambda step: steps.append((id(step.network), step.num_sessions))

    def loading() -> Steps[Served]:
        model = load(EMBEDDED_DRAFT, blas="", is_optimized=True, adapters=files)
        expected = {name: adapted_by_mlx_lm(EMBEDDED_DRAFT, directories.get(name, "")) for name in ("", "a", "b")}
        return Served(model, expected)
        yield

    def checking(served: Served, cache: SessionCache, position: int, token_ids: Sequence[int]) -> Steps[None]:
        check(served, cache, (yield from request(cache, position, token_ids)))

    async def turns(served: Served, seed: int, adapter: str) -> None:
        draw, cache = random.Random(seed), served.cache(adapter)
        await engine.submit(checking(served, cache, 0, some_tokens(draw, draw.randint(3, 30))), cache)
        for _ in range(12):
            position = draw.randint(max(cache.cached_len - 5, 1), cache.cached_len)
            await engine.submit(checking(served, cache, position, some_tokens(draw, draw.randint(1, 8))), cache)

    try:
        served = (await engine.submit(loading())).result
        async with asyncio.timeout(120), asyncio.TaskGroup() as together:
            for seed in range(9):
                together.create_task(turns(served, seed, ("", "a", "b")[seed % 3]))
    finally:
        await asyncio.to_thread(engine.stop)
    assert len({network for network, _ in steps}) == 3
    assert max(num_sessions for _, num_sessions in steps) == 3  # those of one adapter share steps


# -- Prefixes


def test_a_prefix_serves_sessions_of_its_own_adapter_alone(served: Served) -> None:
    """Sessions of all adapters have the same tokens, and leave them in one prefix cache."""
    draw, prefixes = random.Random(5), PrefixCache(2**30)
    beginning = some_tokens(draw, 60)
    for turn in range(3):
        for name in NAMES:
            cache = served.cache(name, prefixes)
            token_ids = [*beginning, *some_tokens(draw, 3)]
            check(served, cache, finish(request(cache, 0, token_ids)))
            assert cache.reused_len == (60 if turn else 0), f"{name} took tokens of another"
            cache.keep()
    assert prefixes.num_entries >= len(NAMES)


# -- Other kinds of layers


def adapter_of(network: Any, directory: str) -> Adapter:
    (files,) = read_adapters(f"a={directory}", "base")
    return Adapter.read(network, files)


def test_a_quantised_base(tmp_path: Path) -> None:
    """As on a GPU, where weights stay as they are stored: mlx-lm's low-rank layers are before quantised ones."""
    network, _ = load_model(Path(EMBEDDED_DRAFT))
    directory = save_adapter(tmp_path / "a", network, seed=1)
    adapted = adapter_of(network, directory).on(network)
    expected = load_adapters(load_model(Path(EMBEDDED_DRAFT))[0], directory)
    tokens = mx.array([some_tokens(random.Random(1), 30)])
    assert mx.array_equal(adapted(tokens), expected(tokens))
    assert not mx.array_equal(network(tokens), expected(tokens))
    assert any(array.dtype == mx.uint32 for array in arrays_in(adapted).values())


def test_quantised_caches(tmp_path: Path) -> None:
    files = read_adapters(f"a={save_adapter(tmp_path / 'a', EMBEDDED_DRAFT, seed=1)}", EMBEDDED_DRAFT)
    model = load(EMBEDDED_DRAFT, blas="", kv_bits=8, kv_group_size=32, adapters=files)
    cache = SessionCache(model)
    cache.choose("a")
    tokens = some_tokens(random.Random(2), 30)
    logits = finish(request(cache, 0, tokens))
    assert {type(each) for each in cache.layers.caches} == {QuantizedCache}
    expected = np.array(adapted_by_mlx_lm(EMBEDDED_DRAFT, str(tmp_path / "a"))(mx.array([tokens]))[0])
    assert np.abs(logits - expected[-len(logits) :]).max() < 0.1 * np.abs(expected).max()


# Experts, recurrent states, both in turn, windows, other names of layers, and shared products.
@pytest.mark.parametrize("name", ["qwen3_moe", "mamba2", "falcon_h1", "qwen3_next", "gemma3_text", "deepseek_v3"])
def test_other_families(name: str, tmp_path: Path) -> None:
    network = make_network(name)
    directory = save_adapter(tmp_path / "a", network, seed=1, rank=3, size=0.1)
    adapter = adapter_of(network, directory)
    batches = enable_batches(network)
    check_logits(network, [adapter], batches=batches)

    adapted = adapter.on(network)
    expected = load_adapters(_copied(network, {}), directory)
    draw = random.Random(name)
    tokens = [draw.randrange(TINY_VOCABULARY_SIZE) for _ in range(30)]
    whole = expected(mx.array([tokens]))[0]
    caches = [bare_cache(adapted, batches=batches) for _ in range(2)]
    for start, end in ((0, 9), (9, 10), (10, 17), (17, 20)):
        mx.eval(forward([Feed(cache, mx.array(tokens[start:end])) for cache in caches]))
    for cache, position in zip(caches, (18, 14), strict=True):
        reached = cache.layers.rewind(position)
        (logits,) = forward([Feed(cache, mx.array(tokens[reached:]))])
        assert mx.max(mx.abs(logits - whole[reached:])) < 1e-3 * mx.max(mx.abs(whole))
    assert mx.max(mx.abs(network(mx.array([tokens]))[0] - whole)) > 0.01 * mx.max(mx.abs(whole))


def test_compiled_passes_hold_the_weights_of_their_own_adapter(tmp_path: Path) -> None:
    with whole_buffers(make_network("qwen3"), compiles=True) as network:
        static = StaticStep(network, 10**6, 1)
        adapted = [
            adapter_of(network, save_adapter(tmp_path / str(i), network, seed=i, size=0.2)).on(network)
            for i in range(2)
        ]
        forms = [(network, static), *((each, static.of(each)) for each in adapted)]
        caches = [bare_cache(each, static=own) for each, own in forms]
        for tokens in ([1, 2, 3, 4, 5], [6], [7, 8], [9]):
            own = [forward([Feed(cache, mx.array(tokens))])[0] for cache in caches]
        for (each, _), logits in zip(forms, own, strict=True):
            expected = each(mx.array([[1, 2, 3, 4, 5, 6, 7, 8, 9]]))[0, -1:]
            assert mx.max(mx.abs(logits - expected)) < 1e-3 * mx.max(mx.abs(expected))


# -- What cannot be served


def written(directory: Path, **changes: Any) -> Path:
    """Save an adapter, and change entries of its config; None removes one."""
    save_adapter(directory, EMBEDDED_DRAFT, seed=1, num_layers=2)
    path = directory / "adapter_config.json"
    config = {name: value for name, value in {**json.loads(path.read_text()), **changes}.items() if value is not None}
    path.write_text(json.dumps(config))
    return directory


def with_tensors(directory: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Path:
    save_adapter(directory, EMBEDDED_DRAFT, seed=1, num_layers=2)
    path = str(directory / "adapters.safetensors")
    weights: Any = mx.load(path)
    mx.save_safetensors(path, change(dict(weights)))
    return directory


def parameters(**changes: Any) -> dict[str, Any]:
    return {"lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0, **changes}}


def without(directory: Path, name: str, *, other: str = "") -> Path:
    written(directory)
    (directory / name).rename(directory / (other or "moved"))
    return directory


def text_in(directory: Path, name: str, text: str) -> Path:
    written(directory)
    (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "is not a directory"),
        (lambda path: without(path, "adapter_config.json"), "has no adapter_config.json: name a directory that"),
        (
            lambda path: without(path, "adapters.safetensors", other="adapter_model.safetensors"),
            "has no adapters.safetensors: it is one of PEFT",
        ),
        (lambda path: text_in(path, "adapter_config.json", "{"), "adapter_config.json cannot be read"),
        (lambda path: text_in(path, "adapter_config.json", "[]"), "adapter_config.json is not a JSON object"),
        (lambda path: text_in(path, "adapters.safetensors", "x" * 99), "is not a valid safetensors file"),
        (lambda path: written(path, fine_tune_type="full"), "its fine_tune_type is 'full'.*mlx_lm.fuse"),
        (lambda path: written(path, fine_tune_type="dora"), "its fine_tune_type is 'dora'.*mlx_lm.fuse"),
        (lambda path: written(path, lora_parameters=None), "lora_parameters is None"),
        (lambda path: written(path, num_layers="all"), "num_layers is 'all'"),
        (lambda path: written(path, **parameters(rank=0)), r"rank is 0 in .*: it must be in \[1, 4096\]"),
        (lambda path: written(path, **parameters(rank=True)), "rank is True"),
        (lambda path: written(path, **parameters(scale=None, alpha=16)), "scale is None .*no 'alpha'"),
        (lambda path: written(path, **parameters(dropout=1.0)), "dropout is 1.0"),
        (lambda path: written(path, **parameters(keys="q_proj")), "keys is 'q_proj'"),
        # These need the network.
        (lambda path: written(path, num_layers=99), "it is for the last 99 layers, and the model has"),
        (lambda path: written(path, **parameters(rank=4)), r"lora_a: adapter shape \(\d+, 8\) does not match"),
        (lambda path: written(path, num_layers=1), "not an adapter parameter in the model"),
        (
            lambda path: with_tensors(path, lambda w: {f"model.layers.77.{name}": array for name, array in w.items()}),
            "model.layers.77.*not an adapter parameter",
        ),
        (
            lambda path: with_tensors(path, lambda w: {k: v for k, v in w.items() if not k.endswith("lora_b")}),
            "has '.*lora_a', but not '.*lora_b'",
        ),
        (lambda path: with_tensors(path, lambda w: {"model.norm.weight": mx.zeros(4), **w}), "no part of a low-rank"),
        (lambda path: with_tensors(path, lambda w: {}), "has no tensors"),
        (
            lambda path: with_tensors(path, lambda w: {name: array * np.nan for name, array in w.items()}),
            "gives logits that are not finite",
        ),
    ],
)
def test_an_adapter_that_cannot_be_served_has_a_reason(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    directory = make(tmp_path / "a")
    with pytest.raises(StartupError, match=message) as raised:
        load(EMBEDDED_DRAFT, blas="", adapters=read_adapters(f"sql={directory}", EMBEDDED_DRAFT))
    assert "adapter" in str(raised.value)


def test_shapes_are_checked_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = written(tmp_path / "a", **parameters(rank=4))
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(StartupError, match="does not match"):
        load(EMBEDDED_DRAFT, blas="", adapters=read_adapters(f"sql={directory}", EMBEDDED_DRAFT))


def test_a_model_with_an_encoder_has_no_adapters(tmp_path: Path) -> None:
    files = read_adapters(f"sql={written(tmp_path / 'a')}", EMBEDDED_T5_DRAFT)
    with pytest.raises(StartupError, match="its model has an encoder"):
        load(EMBEDDED_T5_DRAFT, blas="", adapters=files)


def test_a_head_does_not_draft_beside_adapters(tmp_path: Path) -> None:
    """A head that was asked for is an error, and one of the model's own, the default, is left out."""
    files = read_adapters(f"sql={written(tmp_path / 'a')}", EMBEDDED_DRAFT)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"model_type": "qwen3_mtp"}')
    head = str(tmp_path / "head")
    with pytest.raises(StartupError, match="cannot draft for sessions with adapters: leave out --adapters"):
        _beside_adapters(head, files)
    assert _beside_adapters(OWN_HEAD, files) == ""
    assert _beside_adapters(EMBEDDED_DRAFT, files) == EMBEDDED_DRAFT
    assert [_beside_adapters(each, []) for each in (head, OWN_HEAD)] == [head, OWN_HEAD]


def test_an_adapter_has_a_name_of_its_own(tmp_path: Path) -> None:
    name = Path(EMBEDDED_DRAFT).name
    with pytest.raises(StartupError, match=f"the adapter {name} has the name of its model"):
        read_adapters(f"{name}={tmp_path}", EMBEDDED_DRAFT)


def test_the_fingerprint_is_of_the_contents(tmp_path: Path) -> None:
    one, same, other = (
        load(EMBEDDED_DRAFT, blas="", adapters=read_adapters(f"{name}={directory}", EMBEDDED_DRAFT)).info
        for name, directory in (
            ("a", save_adapter(tmp_path / "1", EMBEDDED_DRAFT, seed=1)),
            ("b", save_adapter(tmp_path / "2", EMBEDDED_DRAFT, seed=1)),
            ("a", save_adapter(tmp_path / "3", EMBEDDED_DRAFT, seed=1, size=0.0500001)),
        )
    )
    assert one.adapters[0].fingerprint == same.adapters[0].fingerprint != other.adapters[0].fingerprint
    assert len({info.fingerprint for info in (one, same, other)}) == 1  # that of the base
    assert not any(info.decodes_like(one) for info in (same, other))
