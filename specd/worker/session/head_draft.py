"""Proposals by a head of the target itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from specd.model_info import ModelInfo
from specd.sampling import Sampling, TokenDistribution
from specd.step_costs import StepCosts
from specd.worker.engine.jobs import Evaluate, Steps
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.proposal import DraftedTokens, draft_tokens
from specd.worker.session.self_draft import SelfProposal, distributions_of, proposal_or_fault
from specd.worker.session.session_cache import SessionCache

# Hidden states that may wait for the head. It must see them before the session forgets them.
_MOST_WAITING = 64


@dataclass(frozen=True)
class HeadDraft:
    """A head of the target: its description and costs."""

    info: ModelInfo
    costs: StepCosts

    def begin(self, sampling: Sampling, vocabulary_size: int) -> SessionHead:
        """Begin a session."""
        return SessionHead(sampling, vocabulary_size)


class SessionHead:
    """Proposes tokens for one session with the head of its target.

    Its state is in the target's cache (`HeadCache`), and a fault costs the session only speed.
    """

    caches: Sequence[SessionCache] = ()

    def __init__(self, sampling: Sampling, vocabulary_size: int) -> None:
        self._sampler = Sampler(replace(sampling, vocabulary_size=vocabulary_size), vocabulary_size)
        self._latest = DraftedTokens([], 0)

    def propose(
        self, target: SessionCache, next_token_id: int, num_draft_tokens: int, min_confidences: Sequence[float]
    ) -> Steps[SelfProposal]:
        """Propose tokens after the tokens of the session that the target's cache holds, and the target's next one.

        First the head reads the target's own states of the last round, so that its state does not depend on what it has
        guessed.
        """
        self._latest = DraftedTokens([], 0)
        steps = self._draft(target, next_token_id, num_draft_tokens, min_confidences)
        self._latest, proposal = yield from proposal_or_fault(steps)
        return proposal

    def keep_up(self, target: SessionCache, next_token_id: int) -> Steps[None]:
        """Let the head see hidden states that would be forgotten, in rounds without a proposal."""
        assert target.head_cache is not None
        if target.known_len - target.head_cache.end >= _MOST_WAITING:
            yield from target.head_cache.read(*_tokens_to_read(target, next_token_id))
            yield Evaluate(target.head_cache.arrays)

    def distributions(self, token_ids: Sequence[int]) -> list[TokenDistribution]:
        """Return the distributions that these tokens, the first of a proposal, were sampled from."""
        return distributions_of(self._latest, token_ids)

    def _draft(
        self, target: SessionCache, next_token_id: int, num_draft_tokens: int, min_confidences: Sequence[float]
    ) -> Steps[DraftedTokens]:
        cache = target.head_cache
        assert cache is not None

        def feed(latest: mx.array | None) -> Steps[mx.array]:
            if latest is not None:
                return cache.next_logits(latest)
            return cache.first_logits(target.layers, *_tokens_to_read(target, next_token_id), num_draft_tokens)

        start = target.known_len + 1
        num_draft_tokens = min(num_draft_tokens, cache.most_draft_tokens)
        history = self._sampler.history(target.token_ids[: target.known_len], [next_token_id])
        return (yield from draft_tokens(feed, self._sampler, start, history, num_draft_tokens, min_confidences))


def _tokens_to_read(target: SessionCache, next_token_id: int) -> tuple[list[int], int]:
    """Return the tokens behind the hidden states that the head has not read, and the position of the first token."""
    assert target.head_cache is not None
    position = max(min(target.head_cache.end, target.known_len) - 1, 0)
    return [*target.token_ids[position : target.known_len], next_token_id], position
