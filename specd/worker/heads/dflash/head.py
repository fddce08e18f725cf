"""DFlash (arXiv:2602.06036), DFlash 2 and DSpark (arXiv:2607.05147): heads that draft a block of tokens in one pass.

The files are those of z-lab, of DeepSpec and SGLang's SpecForge, and of vLLM's speculators, after z-lab's model.py and
vLLM's qwen3_dflash.py, qwen3_dflash2.py and qwen3_dspark.py. The confidence head of DSpark is not used: specd gets a
confidence from the logits of any draft.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.cache import KVCache, RotatingKVCache

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.worker.engine.batch_layer import BatchLayer
from specd.worker.engine.forward import batch_layers, let_attention_take_batches
from specd.worker.engine.jobs import Feed
from specd.worker.heads.dflash.chain import CandidateSelector, Chain, MarkovHead
from specd.worker.heads.dflash.config import parsed
from specd.worker.heads.dflash.context import Context
from specd.worker.heads.dflash.layer import BlockLayer
from specd.worker.heads.head import Head
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.kind import HeadKind, Tensors
from specd.worker.heads.recent_states import KEPT
from specd.worker.heads.row_map import RowMap
from specd.worker.layers.session_layers import SessionLayers

# Tensors that no pass reads: a mask of the head's vocabulary, copies of the target's own, tables of angles, the
# confidence head, a placeholder.
_UNREAD = re.compile(r"t2d|verifier_.*|.*rotary_emb\..*|confidence_head\..*|mask_embedding")


class DFlashHead(Head):
    """Layers over a block of tokens, which see a context: fused hidden states of several layers of the target.

    A block is the session's last token, and a mask token for each token to draft. The keys and values of the context
    are in the head's layers, and those of a block are there only while it is computed.
    """

    def __init__(self, config: Mapping[str, Any], network: Any, names: Collection[str]) -> None:
        """Make a head for a network, with random weights. Raises ValueError for a form that is not known."""
        args = parsed(config)
        states = HiddenStates(network, args.reads)
        size, eps = args.layer.hidden_size, args.layer.rms_norm_eps
        super().__init__(states, size)
        self.most_draft_tokens = args.most_draft_tokens
        self._args = args
        self.fc = Linear(states.size, size, bias="fc.bias" in names)
        self.hidden_norm = RMSNorm(size, eps)
        own = {name.removeprefix("layers.0.") for name in names if name.startswith("layers.0.")}
        self.layers = [BlockLayer(args, own, is_causal=is_causal) for is_causal in args.is_causal]
        self.norm = RMSNorm(size, eps)
        self._num_rows = states.logits(states.embed(mx.array([0]))).shape[-1]
        if "embed_tokens.weight" in names:
            self.embed_tokens = Embedding(args.vocabulary_size, size)
        if "lm_head.weight" in names:
            self.lm_head = Linear(size, args.num_drafted, bias=False)
        if "d2t" in names:
            self.d2t = mx.zeros(args.num_drafted, mx.int64)
        self._check()
        if args.markov_rank:
            self.markov_head = MarkovHead(args.vocabulary_size, args.num_drafted, args.markov_rank)
        if args.selector_rank:
            selector = (args.vocabulary_size, args.selector_rank, args.selector_top_k)
            self.candidate_selector = CandidateSelector(size, *selector)
        self._row_map: RowMap | None = None
        let_attention_take_batches(self)

    def _check(self) -> None:
        """Raise ValueError if the sizes of the configuration do not fit to the target."""
        args, num_rows = self._args, self._num_rows
        size_of_target = self.states.size // len(self.states.layers)
        if self.size != size_of_target and not {"embed_tokens", "lm_head"} <= self.keys():
            raise ValueError(f"its states have {self.size} numbers, and those of the target {size_of_target}")
        if not num_rows <= args.vocabulary_size or args.num_drafted > num_rows:
            raise ValueError(
                f"it drafts {args.num_drafted} of {args.vocabulary_size} tokens; the target has {num_rows}"
            )
        if args.num_drafted < num_rows and not {"lm_head", "d2t"} <= self.keys():
            raise ValueError(
                f"it drafts {args.num_drafted} tokens, the target has {num_rows}, lm_head or d2t is missing"
            )
        if args.num_drafted < num_rows and args.selector_rank:
            raise ValueError(f"its selector drafts {args.num_drafted} tokens, and the target has {num_rows}")
        if not 0 <= args.mask_token_id < (args.vocabulary_size if "embed_tokens" in self else num_rows):
            raise ValueError(f"mask_token_id {args.mask_token_id} has no embedding")

    def make_cache(self) -> list[Any]:
        """Return a cache of mlx-lm for each layer."""
        return [KVCache() if window is None else RotatingKVCache(window) for window in self._args.windows]

    def begin(self) -> Context:
        """Begin a session without tokens."""
        return Context(self, self.block, self.chain)

    def measured_footprint(self) -> CacheFootprint:
        """Return the memory that a session keeps, without computation."""
        layers = SessionLayers(self)
        state = mx.zeros((1, self.size), self.states.dtype)
        self._append(state, layers)
        return CacheFootprint.total([layers.footprint, CacheFootprint({KEPT: state.nbytes, ALL_TOKENS: 0})])

    def fuse(self, hidden: mx.array) -> mx.array:
        """Return the states [n, size] that the head reads, of the target's hidden states [n, states.size]."""
        fused: mx.array = self.hidden_norm(self.fc(hidden.astype(self.states.dtype)))
        return fused

    def block(self, token_id: int, num_draft_tokens: int) -> mx.array:
        """Return the tokens of a block behind a session that ends with this token."""
        num_masks = num_draft_tokens - self._args.samples_from_anchor
        return mx.array([token_id, *[self._args.mask_token_id] * num_masks], mx.uint32)

    def __call__(self, token_ids: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the head's states [..., size] for the tokens of blocks.

        The tokens are [1, n] of one session, or [tokens, 1] of several, with a `BatchLayer` for each of its layers.
        Their keys and values stay in the caches.
        """
        embedded = self.embed_tokens(token_ids) if "embed_tokens" in self else self.states.embed(token_ids)
        x: mx.array = embedded * self._args.embedding_scale
        spans = cache[0].spans if isinstance(cache[0], BatchLayer) else [slice(0, token_ids.size)]
        places = mx.concatenate([mx.arange(span.stop - span.start) for span in spans])
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, places, own)
        normed: mx.array = self.norm(x)
        return normed

    def logits(self, states: mx.array) -> mx.array:
        """Return the logits [..., rows] of the head's states [..., size], with its own rows."""
        logits: mx.array = self.lm_head(states) if "lm_head" in self else self.states.logits(states)
        logits = logits * self._args.output_multiplier
        cap = self._args.logit_cap
        return mx.tanh(logits / cap) * cap if cap else logits

    def chain(self, logits: mx.array, states: mx.array) -> Chain:
        """Return the logits, with the target's rows, of each of n draft tokens, of logits [n, rows] and states."""
        if "markov_head" in self:
            chain = self.markov_head.chain(logits)
        elif "candidate_selector" in self:
            chain = self.candidate_selector.chain(logits, states)
        else:

            def chain(i: int, _: mx.array) -> mx.array:
                return logits[i : i + 1]

        if "d2t" not in self:
            return chain
        if self._row_map is None:
            self._row_map = RowMap(self._num_rows, mx.arange(self.d2t.size) + self.d2t)
        in_rows = self._row_map
        return lambda i, previous: in_rows(chain(i, previous))

    def compute(self, feeds: Sequence[Feed]) -> list[Any]:
        """Append states to each session's context; return logits [n, rows] and states [n, size] for its draft tokens.

        A feed that wants no logits has no block: its tokens are not looked at.
        """
        if len(feeds) > 1 and not feeds[0].cache.batches:
            return [outputs for feed in feeds for outputs in self.compute([feed])]
        try:
            for feed in feeds:
                self._append(cast("mx.array", feed.hidden), feed.cache.layers)
            return self._blocks(feeds) if feeds[0].wants_logits else [None] * len(feeds)
        finally:  # also after an error, which costs this proposal only
            for feed in feeds:
                for cache in feed.cache.layers.caches:
                    cache.rewind(feed.cache.layers.num_fed)

    def _blocks(self, feeds: Sequence[Feed]) -> list[tuple[mx.array, mx.array]]:
        """Compute a block for each session, and leave its keys and values in the caches."""
        if len(feeds) == 1:
            spans = [slice(0, feeds[0].num_tokens)]
            rows = self(feeds[0].token_ids[None], feeds[0].cache.layers.caches)[0]
        else:
            layers, spans = batch_layers(feeds)
            rows = self(mx.concatenate([feed.token_ids for feed in feeds])[:, None], layers)[:, 0]
        num_given = not self._args.samples_from_anchor
        states = [rows[span.start + num_given : span.stop] for span in spans]
        ends = [*accumulate(each.shape[0] for each in states)]
        logits = mx.split(self.logits(mx.concatenate(states)), ends[:-1])
        return [*zip(logits, states, strict=True)]

    def _append(self, states: mx.array, layers: SessionLayers) -> None:
        """Append states [n, size] to a session's context, lazily."""
        if not states.shape[0]:
            return
        for layer, cache in zip(self.layers, layers.caches, strict=True):
            layer.self_attn.append(states[None], cache)
        layers.fed(states.shape[0])


def _renamed(tensors: Tensors) -> Tensors:
    """Return the tensors by the names of `DFlashHead`."""
    named = {name.removeprefix("model."): each for name, each in tensors.items()}
    return {
        f"{name}.weight" if name.endswith("_codebook") else name: each
        for name, each in named.items()
        if not _UNREAD.fullmatch(name)
    }


KIND = HeadKind(DFlashHead, _renamed)
