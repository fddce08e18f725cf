"""A session: its tokens, and what a round does to them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.plan import Plan


class FinishReason(enum.Enum):
    """Why a session ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"


class SessionState(enum.Enum):
    """What a session is doing."""

    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(frozen=True)
class Commit:
    """The tokens that a round emitted: the accepted ones, then the target's own unless the text ended before it.

    The session's last one has a finish reason.
    """

    token_ids: list[int]
    num_accepted: int
    recovered: bool = False
    bonus: bool = False
    finish_reason: FinishReason | None = None

    def cut(self, num_tokens: int, finish_reason: FinishReason) -> Commit:
        """Return what is left when the session ends with the first `num_tokens` of these tokens."""
        assert 0 < num_tokens <= len(self.token_ids)
        whole = num_tokens == len(self.token_ids)
        return Commit(
            self.token_ids[:num_tokens],
            min(self.num_accepted, num_tokens),
            recovered=self.recovered and whole,
            bonus=self.bonus and whole,
            finish_reason=finish_reason,
        )


@dataclass
class Session:
    """One decode. The coordinator owns its tokens; the workers' caches are copies of prefixes of them.

    End and stop tokens end it only after `min_tokens` others.
    Invariant: len(token_ids) == prompt_len + num_generated, 0 <= num_generated <= max_tokens.
    """

    session_id: str
    token_ids: list[int]
    max_tokens: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    finish_reason: FinishReason | None = None
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)
        assert self.prompt_len > 0
        assert self.max_tokens > 0

    @property
    def num_generated(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def can_draft(self) -> bool:
        """Whether any round can have a proposal: neither the first nor one with room for a single token does."""
        return self.max_tokens > 2

    @property
    def state(self) -> SessionState:
        """What the session is doing."""
        if self.finish_reason is not None:
            return SessionState.FINISHED
        return SessionState.DECODING if self.num_generated else SessionState.PREFILLING

    def bound(self, plan: Plan) -> Plan:
        """Return a plan that goes no further than there is room.

        No draft tokens in the first round: the target prefills, and the first token must not wait for the draft. And
        never so many that full acceptance, with the bonus token, would go past max_tokens.
        """
        if self.num_generated == 0:
            return Plan(0)
        return plan.within(self.max_tokens - self.num_generated - 1)

    def commit(self, proposal: Sequence[int], num_accepted: int, next_token_id: int) -> Commit:
        """Append what a round gave: the accepted part of the proposal and the target's own next token.

        The text ends at the first end or stop token, whether it was accepted or the target's own.
        """
        assert self.finish_reason is None
        assert 0 <= num_accepted <= len(proposal) < self.max_tokens - self.num_generated
        full = num_accepted == len(proposal)
        commit = Commit([*proposal[:num_accepted], next_token_id], num_accepted, recovered=not full, bonus=full)
        for i, token_id in enumerate(commit.token_ids):
            reason = self._finish_reason(token_id, self.num_generated + i)
            if reason is not None:
                commit = commit.cut(i + 1, reason)
                break
        self.token_ids.extend(commit.token_ids)
        self.finish_reason = commit.finish_reason
        return commit

    def _finish_reason(self, token_id: int, num_before: int) -> FinishReason | None:
        """Return why a token with `num_before` generated ones before it is the last, if it is."""
        if num_before >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return FinishReason.EOS
            if token_id in self.stop_token_ids:
                return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if num_before + 1 == self.max_tokens else None
