"""The coordinator: takes requests, keeps their sessions, and drives their rounds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import structlog

from coordinator.decoding import decode
from coordinator.drafter import Drafter, DraftLink
from coordinator.metrics import CoordinatorMetrics
from coordinator.request import check_num_draft_tokens, check_prompt, resolve_max_tokens
from coordinator.round import Round
from coordinator.run_ahead import run_ahead
from coordinator.session import FinishReason, Session, SessionState
from coordinator.statistics import SessionStatistics
from coordinator.tokenizer import TextStream, Tokenizer
from coordinator.verifier import TargetLink, Verifier
from coordinator.worker_stream import WorkerError
from specd.errors import InternalError
from specd.model_info import ModelInfo
from specd.settings import CoordinatorSettings

log = structlog.get_logger()

# Rounds that a session may be ahead of what its client has read.
_ROUNDS_AHEAD = 64


@dataclass(frozen=True)
class EmittedToken:
    """A token, the text that it completes, and whether the draft proposed it."""

    token_id: int
    text: str
    drafted: bool


@dataclass(frozen=True)
class Emission:
    """What one round gives the client; the last one has a finish reason."""

    session_id: str
    tokens: list[EmittedToken]
    round: Round
    finish_reason: FinishReason | None
    statistics: SessionStatistics


class Coordinator:
    """Generates text with one target and, while it is there, one draft."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        metrics: CoordinatorMetrics,
        *,
        model: ModelInfo,
        tokenizer: Tokenizer,
        target: TargetLink,
        draft: DraftLink,
    ) -> None:
        """Use a target link whose model and tokenizer are these."""
        self.settings = settings
        self.model = model
        self.draft = draft
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._target = target
        self._sessions: dict[str, Session] = {}
        metrics.active_sessions.set_function(lambda: len(self._sessions))
        for state in (SessionState.PREFILLING, SessionState.DECODING):
            metrics.sessions_by_state.labels(state.value).set_function(partial(self._count_sessions, state))
        metrics.session_tokens.set_function(
            lambda: sum(len(session.token_ids) for session in tuple(self._sessions.values()))
        )

    @property
    def target_is_there(self) -> bool:
        """Whether the target can take rounds now."""
        return self._target.model is not None

    def model_names(self) -> dict[str, str]:
        """Name the models, for logs."""
        draft = self.draft.model
        return {"target": self.model.name, "draft": draft.name if draft else f"none ({self.draft.fault})"}

    async def generate(
        self, prompt: str | list[int], *, max_tokens: int | None, num_draft_tokens: int | None
    ) -> AsyncGenerator[Emission]:
        """Generate what comes after a prompt, a round at a time; closing the iterator ends the session.

        Raises InvalidRequestError, UnavailableError, or InternalError when the target refuses or breaks.
        """
        arrived_at = time.perf_counter()
        session = self._begin(await self._encode(prompt), max_tokens, num_draft_tokens)
        with structlog.contextvars.bound_contextvars(session_id=session.session_id):
            drafter = Drafter(
                self.draft,
                session.session_id,
                timeout_seconds=self.settings.draft_timeout_seconds,
                clock=time.perf_counter,
            )
            verifier = Verifier(
                self._target,
                session.session_id,
                timeout_seconds=self.settings.target_timeout_seconds,
                recovery_seconds=self.settings.target_recovery_seconds,
                clock=time.perf_counter,
            )
            statistics = SessionStatistics(prompt_tokens=session.prompt_len)
            text = self._tokenizer.stream_text(session.token_ids)
            outcome = "failed"
            try:
                decoding = decode(session, drafter, verifier, clock=time.perf_counter)
                async with aclosing(run_ahead(decoding, limit=_ROUNDS_AHEAD)) as rounds:
                    async for round_ in rounds:
                        self._metrics.count_round(round_, first=statistics.rounds == 0)
                        statistics.add(round_, arrived_at=arrived_at)
                        statistics.target_replays = verifier.num_replays
                        log.debug("round", number=statistics.rounds, accepted=round_.commit.num_accepted)
                        # Not the session's finish reason: its rounds are ahead of this one.
                        finish_reason = round_.commit.finish_reason
                        tokens = _tokens_with_text(round_, text, last=finish_reason is not None)
                        if finish_reason is not None:
                            outcome = finish_reason.value
                        yield Emission(session.session_id, tokens, round_, finish_reason, statistics)
            except WorkerError as error:
                raise InternalError(error.reason, str(error)) from error
            except (GeneratorExit, asyncio.CancelledError):  # the client went away
                outcome = "cancelled" if outcome == "failed" else outcome
                raise
            finally:
                drafter.close()
                verifier.close()
                del self._sessions[session.session_id]
                self._metrics.count_session(statistics, outcome, target_replays=verifier.num_replays)
                log.info(
                    "session ended",
                    outcome=outcome,
                    prompt_tokens=statistics.prompt_tokens,
                    generated_tokens=statistics.generated_tokens,
                    rounds=statistics.rounds,
                    proposed=statistics.proposed_tokens,
                    accepted=statistics.accepted_tokens,
                )

    def _count_sessions(self, state: SessionState) -> int:
        return sum(session.state is state for session in tuple(self._sessions.values()))

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            return []  # and not its encoding, which can be a special token
        return await asyncio.to_thread(self._tokenizer.encode, prompt)  # a megabyte takes a second

    def _begin(self, token_ids: list[int], max_tokens: int | None, num_draft_tokens: int | None) -> Session:
        if num_draft_tokens is None:
            num_draft_tokens = self.settings.num_draft_tokens
        check_num_draft_tokens(num_draft_tokens)
        check_prompt(self.model, token_ids)
        session = Session(
            session_id=secrets.token_hex(8),
            token_ids=token_ids,
            max_tokens=resolve_max_tokens(self.model, len(token_ids), max_tokens),
            num_draft_tokens=num_draft_tokens,
            eos_token_ids=frozenset(self.model.eos_token_ids),
        )
        self._sessions[session.session_id] = session
        self._metrics.prompt_tokens.inc(session.prompt_len)
        return session


def _tokens_with_text(round_: Round, text: TextStream, *, last: bool) -> list[EmittedToken]:
    tokens = [
        EmittedToken(token_id, text.push(token_id), drafted=i < round_.commit.num_accepted)
        for i, token_id in enumerate(round_.commit.token_ids)
    ]
    if last:
        tokens[-1] = replace(tokens[-1], text=tokens[-1].text + text.finish())
    return tokens
