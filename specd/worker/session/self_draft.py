"""Proposals of a target worker that drafts itself: after its verdict, for the session's next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from specd.errors import InvalidRequestError, SpecdError
from specd.model_info import ModelInfo
from specd.sampling import Sampling, TokenDistribution, certain
from specd.step_costs import StepCosts
from specd.worker.engine.jobs import Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.proposal import DraftedTokens, propose
from specd.worker.session.session_cache import SessionCache, free_on_error

log = structlog.get_logger()


class SelfDraft(Protocol):
    """The draft in a target worker, for all sessions: a model or a head."""

    @property
    def info(self) -> ModelInfo:
        """Its description."""

    @property
    def costs(self) -> StepCosts:
        """The costs of its proposals."""

    def begin(self, sampling: Sampling, vocabulary_size: int) -> SessionDrafter:
        """Begin to propose for a session, of a target with this vocabulary."""


class SessionDrafter(Protocol):
    """Proposes tokens for one session of a target worker.

    A fault costs the session only speed: its proposal is then empty. Only jobs may call the methods.
    """

    @property
    def caches(self) -> Sequence[SessionCache]:
        """Its caches besides the target's, to keep or free with the session."""

    def propose(
        self, target: SessionCache, next_token_id: int, num_draft_tokens: int, min_confidences: Sequence[float]
    ) -> Steps[SelfProposal]:
        """Propose tokens after the tokens of the session that the target's cache holds, and the target's next one."""

    def keep_up(self, target: SessionCache, next_token_id: int) -> Steps[None]:
        """Do what must be done in a round without a proposal."""

    def distributions(self, token_ids: Sequence[int]) -> list[TokenDistribution]:
        """Return the distributions that these tokens, the first of a proposal, were sampled from.

        Tokens of another proposal, or of another life of the worker, are guesses: their distributions are certain of
        them, which is exact for any token that was chosen without the noise of the acceptance.
        """


@dataclass(frozen=True)
class ModelDraft:
    """A draft model in the target's process: its model, costs and cached prefixes."""

    model: LoadedModel
    costs: StepCosts
    prefixes: PrefixCache
    chunk: PrefillChunk

    @property
    def info(self) -> ModelInfo:
        """The model's description."""
        return self.model.info

    def begin(self, sampling: Sampling, vocabulary_size: int) -> SessionDraft:
        """Begin a session."""
        return SessionDraft(self, sampling, vocabulary_size)


@dataclass(frozen=True)
class SelfProposal:
    """The tokens that a target worker proposes after its verdict, or none with a `fault`: why it proposes none."""

    token_ids: Sequence[int] = ()
    confidences: Sequence[float] = ()
    fault: str = ""


class SessionDraft:
    """Proposes tokens for one session with a draft model.

    The cache holds the session's tokens of the last proposal, and tokens of that proposal.
    """

    def __init__(self, draft: ModelDraft, sampling: Sampling, target_vocabulary_size: int) -> None:
        self._draft = draft
        self.cache = SessionCache(draft.model, draft.prefixes)
        info = draft.model.info
        self._fault = ""
        try:
            sampling.check(vocabulary_size=min(target_vocabulary_size, info.vocabulary_size), model_name=info.name)
        except InvalidRequestError as error:  # it has tokens for which the draft has no rows
            self._fault = error.reason
        sampling = replace(sampling, vocabulary_size=target_vocabulary_size)
        self._sampler = Sampler(sampling, info.vocabulary_size)
        self._session_len = 0
        self._latest = DraftedTokens([], 0)

    def propose(
        self, target: SessionCache, next_token_id: int, num_draft_tokens: int, min_confidences: Sequence[float]
    ) -> Steps[SelfProposal]:
        """Propose tokens after the tokens of the session that the target's cache holds, and the target's next one."""
        self._latest = DraftedTokens([], 0)
        session_len = target.known_len + 1
        if self._fault:
            return SelfProposal(fault=self._fault)
        room = self._draft.model.info.context_length - session_len
        if room <= 0:
            return SelfProposal(fault="CONTEXT_EXCEEDED")
        position = min(self._session_len, self.cache.cached_len, session_len - 1)
        token_ids = [*target.token_ids[position : target.known_len], next_token_id]
        self._session_len = session_len
        steps = propose(
            self.cache,
            self._sampler,
            position,
            token_ids,
            min(num_draft_tokens, room),
            chunk=self._draft.chunk,
            min_confidences=min_confidences,
        )
        self._latest, proposal = yield from proposal_or_fault(free_on_error(self.cache, steps))
        return proposal

    @property
    def caches(self) -> list[SessionCache]:
        """The draft's cache."""
        return [self.cache]

    def keep_up(self, target: SessionCache, next_token_id: int) -> Steps[None]:
        """Nothing is lost: the next proposal feeds all tokens since the last."""
        return
        yield

    def distributions(self, token_ids: Sequence[int]) -> list[TokenDistribution]:
        """See `SessionDrafter`."""
        return distributions_of(self._latest, token_ids)


def proposal_or_fault(steps: Steps[DraftedTokens]) -> Steps[tuple[DraftedTokens, SelfProposal]]:
    """Draft tokens, and return them with the proposal. An error costs only speed: both are then without tokens."""
    try:
        drafted = yield from steps
    except Exception as error:
        log.warning("no proposal after the verdict", error=repr(error))
        fault = error.reason if isinstance(error, SpecdError) else "FAILED"
        return DraftedTokens([], 0), SelfProposal(fault=fault)
    return drafted, SelfProposal(drafted.token_ids, drafted.confidences)


def distributions_of(latest: DraftedTokens, token_ids: Sequence[int]) -> list[TokenDistribution]:
    """Return the distributions of the first tokens of the latest proposal, or certain ones for other tokens."""
    same = latest.token_ids[: len(token_ids)] == list(token_ids)
    return latest.distributions[: len(token_ids)] if same else [*map(certain, token_ids)]
