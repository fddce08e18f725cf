"""One forward pass over tokens of several sessions, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import structlog
from mlx.nn.layers.base import Module

from specd.worker.cpu.network import replace_function
from specd.worker.cpu.streams import using_cores
from specd.worker.engine.batch_layer import BatchLayer, attention_for_batches
from specd.worker.engine.cache_users import share_products, watch_cache_users
from specd.worker.engine.jobs import Encode, Feed, SharedPasses
from specd.worker.engine.static_step import StaticStep, run
from specd.worker.layers.session_layers import SessionLayers

log = structlog.get_logger()

# A pass of a trial: the tokens of two sessions, and how many each forgets behind it, if it was fed more.
TrialPass = tuple[Sequence[Sequence[int]], int]
_SHORT_TRIAL: Sequence[TrialPass] = (([[1, 2, 3, 4, 5], [6]], 0), ([[7, 8, 9], [10]], 0))


@dataclass(frozen=True, eq=False)
class BareCache:
    """A cache without a session, for trials of a model."""

    network: Module
    layers: SessionLayers
    batches: bool
    static: StaticStep | None = None
    sharing: SharedPasses | None = None


def bare_cache(network: Module, *, source: Sequence[int] = range(3), **options: Any) -> BareCache:
    """Return an empty cache. For a network with an encoder, it holds a source."""
    layers = SessionLayers(network)
    if has_encoder(network):
        for arrays in layers.read(source):
            mx.eval(arrays)
    return BareCache(network, layers, **{"batches": False, **options})


def has_encoder(network: Module) -> bool:
    """Return whether a network is the decoder of a model with an encoder."""
    return hasattr(network, "encode")


def compute(wanted: Sequence[Feed | Encode], *, owns_all_cores: bool) -> Sequence[Any]:
    """Return the logits after the tokens of each feed, lazily, or the arrays of the part of a source to encode.

    `owns_all_cores` is whether no other process needs the cores of a CPU now.
    """
    if isinstance(wanted[0], Encode):
        with using_cores(owns_all=owns_all_cores):
            return [part.describe() for part in cast("Sequence[Encode]", wanted)]
    return forward(cast("Sequence[Feed]", wanted), owns_all_cores=owns_all_cores)


def forward(feeds: Sequence[Feed], *, owns_all_cores: bool = True) -> list[mx.array]:
    """Feed each session's tokens to its cache, lazily, and return the logits [n, vocabulary rows] after each token.

    The model sees each token as a row of its own, [tokens, 1], at its own position. Layers that treat tokens one by one
    compute all of them at once: no session is padded, and sessions may have different numbers of tokens. Attention is
    computed session by session, on the session's own caches: a session comes, goes and rewinds without the others.
    `owns_all_cores` is whether no other process needs the cores of a CPU now.
    """
    with using_cores(owns_all=owns_all_cores):
        return _forward(feeds)


def _forward(feeds: Sequence[Feed]) -> list[Any]:
    mx.async_eval([feed.token_ids for feed in feeds])  # the device chooses tokens while Python builds the next pass
    if feeds[0].hidden is not None:
        head: Any = feeds[0].network
        return cast("list[Any]", head.compute(feeds))
    with_others: Any = getattr(feeds[0].network, "compute_with_others", None)
    if with_others is not None:  # other ranks hold parts of the network, and feed the same tokens
        return cast("list[Any]", with_others(feeds, _forward_apart))
    sharing = feeds[0].cache.sharing
    if sharing is None:
        return _forward_apart(feeds)
    groups = sharing.groups(feeds)
    outputs = {id(feed): rows for shared, own in groups for feed, rows in zip(own, shared.compute(own), strict=True)}
    others = [feed for feed in feeds if id(feed) not in outputs]
    outputs |= {id(feed): rows for feed, rows in zip(others, _forward_apart(others), strict=True)}
    return [outputs[id(feed)] for feed in feeds]


def _forward_apart(feeds: Sequence[Feed]) -> list[mx.array]:
    if len(feeds) < 2 or not feeds[0].cache.batches:
        return _forward_one_by_one(feeds)
    network = feeds[0].cache.network  # all sessions have the same
    layers, spans = batch_layers(feeds)
    tokens = mx.concatenate([feed.token_ids for feed in feeds])
    rows: mx.array = network(tokens[:, None], cache=layers)
    for feed in feeds:
        feed.cache.layers.fed(feed.num_tokens)
    return [rows[span, 0] for span in spans]


def _forward_one_by_one(feeds: Sequence[Feed]) -> list[mx.array]:
    outputs = []
    for feed in feeds:
        layers, static = feed.cache.layers, feed.cache.static
        if static is not None:
            outputs.append(static(feed.token_ids, layers, wants_logits=feed.wants_logits))
        else:
            outputs.append(run(feed.network, feed.token_ids, layers, wants_logits=feed.wants_logits))
            layers.fed(feed.num_tokens)
    return outputs


def batch_layers(feeds: Sequence[Feed]) -> tuple[list[BatchLayer], list[slice]]:
    """Return the layers of a pass for several sessions, and each session's rows in it."""
    sizes = [feed.num_tokens for feed in feeds]
    spans = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    offset = mx.array([feed.cache.layers.num_fed + i for feed in feeds for i in range(feed.num_tokens)])
    caches = zip(*(feed.cache.layers.caches for feed in feeds), strict=True)
    return [BatchLayer(of_sessions, spans, offset) for of_sessions in caches], spans


def enable_batches(network: Module, expected: mx.array | None = None) -> bool:
    """Make a model compute several sessions in one pass; return whether it can.

    There are two ways: all layers except mlx-lm's attention function compute all tokens at once, or all layers except
    the whole modules that use a cache do. Gemma 2 and multi-head latent attention need the second way, because they
    compute with keys themselves. The first way is used that gives two short sessions the same logits as alone. Longer
    trials are not needed: each session's attention gets the mask of its own cache, and raises an error if the model
    does not pass it on. Where neither way works (Llama 4 computes masks from one offset), sessions take turns.
    `expected` are the logits of single sessions, if they are known.
    """
    if expected is None:
        expected = trial_logits(network, batches=False)
    let_attention_take_batches(network)
    for whole_modules in (False, True):
        try:
            if whole_modules:
                watch_cache_users(network, by_session=True)
            share_products(network)
            if agree(trial_logits(network, batches=True), expected):
                return True
        except Exception as error:  # models can raise any error on these offsets, masks and caches
            log.debug("the model cannot compute several sessions at once this way", error=repr(error))
    return False


def let_attention_take_batches(network: Module) -> None:
    """Let mlx-lm's attention function take several sessions, in the modules of a network's layers."""
    replace_function(network, "scaled_dot_product_attention", attention_for_batches, mark="takes_batches")


def rewinds_exactly(network: Module) -> bool:
    """Return whether a session gets the same logits after a rewind as in one pass."""
    tokens = mx.array([1, 2, 3, 4, 5, 6, 7, 8])
    cache, fresh = (bare_cache(network) for _ in range(2))
    for feed in (tokens[:3], tokens[3:7], tokens[:1]):
        mx.eval(forward([Feed(cache, feed)]))
    if {each.offset for each in cache.layers.caches} != {8}:
        return False  # a cache has a state that does not count tokens
    reached = cache.layers.rewind(5)
    return agree(forward([Feed(cache, tokens[reached:])])[0][5 - reached :], forward([Feed(fresh, tokens)])[0][5:])


def trial_logits(network: Module, trial: Sequence[TrialPass] = _SHORT_TRIAL, **options: Any) -> mx.array:
    """Return the logits [tokens, rows] of two sessions in all passes of a trial but the first.

    `options` are those of `bare_cache`.
    """
    caches = [bare_cache(network, source=range(n), **options) for n in (3, 5)]
    outputs: list[mx.array] = []
    for i, (tokens, num_forgotten) in enumerate(trial):
        logits = forward([Feed(cache, mx.array([*ids])) for cache, ids in zip(caches, tokens, strict=True)])
        mx.eval(logits)
        outputs += logits if i else []
        for cache, ids in zip(caches, tokens, strict=True):
            if forgotten := min(num_forgotten, len(ids) - 1):
                cache.layers.rewind(cache.layers.num_fed - forgotten)
    return mx.concatenate(outputs)


def agree(logits: mx.array, expected: mx.array) -> bool:
    """Return whether two ways to compute the same logits differ by rounding only.

    In float32, rounding is 1e-6 of the largest logit in small models, and 1e-4 where a model has different formulas for
    one token and for several (multi-head latent attention). A wrong mask or position changes logits by a tenth or more.
    In 16 bits the tolerance is eight roundings of the largest logit, 0.06 in bfloat16.
    """
    tolerance = max(1e-3, 8 * mx.finfo(logits.dtype).eps)
    # Not `>`, so that NaN does not agree.
    return bool(mx.max(mx.abs(logits - expected)) <= tolerance * mx.max(mx.abs(expected)))
