"""The assistants of Gemma 4: small networks without keys and values of their own, which read the target's.

The references are transformers' modeling_gemma4_assistant.py, vLLM's gemma4_mtp.py and its proposer, gemma4.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import gemma4_text

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.worker.engine.batch_layer import BatchLayer, Masks
from specd.worker.engine.forward import let_attention_take_batches
from specd.worker.engine.jobs import Feed
from specd.worker.heads.head import Head
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.kind import HeadKind, Tensors
from specd.worker.heads.reader import Reader
from specd.worker.heads.recent_states import KEPT
from specd.worker.heads.row_map import never

_ORDERING = "masked_embedding.token_ordering"
# Parts of a Gemma 4 that no assistant has, by their entries in a configuration.
_UNKNOWN = ("hidden_size_per_layer_input", "enable_moe_block")


class _Clusters(Module):
    """The clusters of a vocabulary: `token_ordering` has the tokens of the first cluster, then those of the next."""

    def __init__(self, config: Mapping[str, Any], size: int, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        num_clusters = config["num_centroids"]
        self._num_best = config["centroid_intermediate_top_k"]
        if not 0 < self._num_best <= num_clusters or num_tokens % num_clusters:
            raise ValueError(f"it takes {self._num_best} of {num_clusters} clusters of {num_tokens} tokens")
        self.centroids = Linear(size, num_clusters, bias=False)
        self.token_ordering = mx.zeros(num_tokens, mx.int32)

    def best(self, states: mx.array) -> mx.array:
        """Return the tokens [n, tokens] of the clusters with the best centroids for states [n, size]."""
        scores = self.centroids(states)
        clusters = mx.argpartition(-scores, self._num_best - 1, axis=-1)[:, : self._num_best]
        return self.token_ordering.reshape(scores.shape[-1], -1)[clusters].flatten(1)


class _LayerRows:
    """The keys and values of the session's tokens in a layer of the target, behind the interface of a cache."""

    def __init__(self, cache: Any, num_known: int, most: int | None) -> None:
        """Read the rows of the first `num_known` tokens, or of the last `most` of them."""
        self._cache = cache
        self._end = num_known
        self._begin = max(num_known - most, 0) if most is not None else 0
        if hasattr(cache, "bits"):  # mlx-lm's attention then takes quantised rows
            self.bits, self.group_size = cache.bits, cache.group_size

    def keys_and_values(self) -> Any:
        """Return the keys and values [1, heads, rows, size]."""
        return self._cache.between(self._begin, self._end)


class GemmaAssistant(Head):
    """Layers of Gemma 4 over the embedding of a token beside a state of the target, or its own state in a chain.

    Each layer has queries only. It attends to the keys and values of the target's last layer with the same kind of
    attention that has its own. All tokens of a chain are computed for one position, that of the last state of the
    target, as in vLLM and mlx-vlm; transformers takes the position behind it.
    """

    def __init__(self, config: Mapping[str, Any], network: Any, names: Collection[str]) -> None:
        """Make a head for a network, with random weights. Raises ValueError for a form that is not known."""
        target: Any = getattr(getattr(network, "language_model", network), "args", None)
        is_gemma = isinstance(target, gemma4_text.ModelArgs)
        if not is_gemma:
            raise ValueError("it is the assistant of a Gemma 4, and the target is not one")
        super().__init__(HiddenStates(network))
        text: Mapping[str, Any] = config["text_config"]
        num_layers = text["num_hidden_layers"]
        form = {"layer_types": text["layer_types"], "num_kv_shared_layers": num_layers, **dict.fromkeys(_UNKNOWN, 0)}
        args: gemma4_text.ModelArgs = gemma4_text.ModelArgs.from_dict({**text, **form})
        size, size_of_state = args.hidden_size, config["backbone_hidden_size"]
        _check_fit(config, target, args, self.states)
        self.batches = True
        self.pre_projection = Linear(2 * size_of_state, size, bias=False)
        self.embed_tokens = Embedding(args.vocab_size, size)  # only of the output layer
        self.layers: list[Any] = [gemma4_text.DecoderLayer(args, layer_idx=i) for i in range(num_layers)]
        self.norm = RMSNorm(size, args.rms_norm_eps)
        self.post_projection = Linear(size, size_of_state, bias=False)
        if config.get("use_ordered_embeddings"):
            self.masked_embedding = _Clusters(config, size, args.vocab_size)
        self._sources = _sources(network, target, self.layers)
        self._window = args.sliding_window
        let_attention_take_batches(self)

    def begin(self) -> Reader:
        """Begin a session without tokens."""
        return Reader(self)

    def measured_footprint(self) -> CacheFootprint:
        """Return the memory that a session keeps, without computation."""
        return CacheFootprint({KEPT: self.size * self.states.dtype.size, ALL_TOKENS: 0})

    def compute(self, feeds: Sequence[Feed]) -> list[tuple[mx.array, mx.array]]:
        """Feed a token and a state to each session; return the logits [1, rows] and the next state [1, size]."""
        readers = [cast("Reader", feed.cache) for feed in feeds]
        if len(feeds) > 1 and not readers[0].batches:
            return [outputs for feed in feeds for outputs in self.compute([feed])]
        embedded = self.states.embed(mx.concatenate([feed.token_ids for feed in feeds])) * self.size**0.5
        hidden = mx.concatenate([cast("mx.array", feed.hidden) for feed in feeds]).astype(embedded.dtype)
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))[:, None]
        position = mx.array([reader.num_known - 1 for reader in readers])
        rows = {kind: self._rows(kind, readers, position) for kind in self._sources}
        mask = Masks([None] * len(readers))
        for layer in self.layers:
            x, _, _ = layer(x, mask, shared_kv=rows[layer.layer_type], offset=position)
        states = self.norm(x)[:, 0]
        logits, following = self.logits(states), self.post_projection(states)
        return [(logits[i : i + 1], following[i : i + 1]) for i in range(len(feeds))]

    def logits(self, states: mx.array) -> mx.array:
        """Return the logits [n, rows] of the head's states [n, size]."""
        if "masked_embedding" not in self:
            logits: mx.array = self.embed_tokens.as_linear(states)
            return logits
        tokens = self.masked_embedding.best(states)
        known = (self.embed_tokens(tokens) @ states[..., None])[..., 0]
        others = never(known, self.masked_embedding.token_ordering.size)
        return mx.put_along_axis(others, tokens, known, axis=-1)

    def _rows(self, kind: str, readers: Sequence[Reader], position: mx.array) -> Any:
        """Return the keys and values of several sessions, as attention takes them, for layers of a kind."""
        most = self._window if kind == "sliding_attention" else None
        rows = [_LayerRows(reader.layers.caches[self._sources[kind]], reader.num_known, most) for reader in readers]
        return BatchLayer(rows, [slice(i, i + 1) for i in range(len(rows))], position).keys_and_values()


def _check_fit(
    config: Mapping[str, Any], target: gemma4_text.ModelArgs, args: gemma4_text.ModelArgs, states: HiddenStates
) -> None:
    """Raise ValueError if an assistant has another form than is known, or belongs to another target."""
    text = config["text_config"]
    if unknown := [name for name in _UNKNOWN if text.get(name)]:
        raise ValueError(f"{unknown[0]} is {text[unknown[0]]!r}, and no assistant with it is known")
    if not config.get("tie_word_embeddings", True):
        raise ValueError("tie_word_embeddings is false, and only an output layer that is the embedding is known")
    num_rows = states.logits(states.embed(mx.array([0]))).shape[-1]
    for noun, own, of_target in (
        ("states of size", config["backbone_hidden_size"], states.size),
        ("a vocabulary of size", args.vocab_size, num_rows),
        ("a window of size", args.sliding_window, target.sliding_window),
    ):
        if own != of_target:
            raise ValueError(f"it needs a target with {noun} {own}, and this one's is {of_target}")


def _sources(network: Any, target: Any, layers: Sequence[Any]) -> dict[str, int]:
    """Return the numbers of the target's last layers with keys and values, by the kinds of an assistant's layers."""
    num_with_own = target.num_hidden_layers - target.num_kv_shared_layers
    last = {kind: i for i, kind in enumerate(target.layer_types[:num_with_own])}
    for layer in layers:
        if layer.layer_type not in last:
            raise ValueError(f"it reads layers with {layer.layer_type}, and the target has none")
        own, other = layer.self_attn, network.layers[last[layer.layer_type]].self_attn
        if own.head_dim != other.head_dim or own.n_heads % other.n_kv_heads:
            raise ValueError(
                f"its {layer.layer_type} has {own.n_heads} heads of size {own.head_dim}, and the target's keys have "
                f"{other.n_kv_heads} of size {other.head_dim}"
            )
    return {layer.layer_type: last[layer.layer_type] for layer in layers}


def _renamed(tensors: Tensors) -> Tensors:
    """Return the tensors by the names of `GemmaAssistant`. Raises ValueError for an ordering of another vocabulary."""
    named = {name.removeprefix("model."): each for name, each in tensors.items()}
    named.pop("lm_head.weight", None)  # a copy of the embedding
    if _ORDERING in named:
        ordering = named[_ORDERING].astype(mx.int32)
        if not mx.array_equal(mx.sort(ordering), mx.arange(ordering.size)):
            raise ValueError(f"{_ORDERING} does not have each token once")
        named[_ORDERING] = ordering
    return named


KIND = HeadKind(GemmaAssistant, _renamed)
