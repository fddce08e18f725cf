"""A session: its tokens, and what a round does to them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a session ended."""

    STOP = "stop"
    LENGTH = "length"


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


@dataclass
class Session:
    """One decode. The coordinator owns its tokens; the workers' caches are copies of prefixes of them.

    Invariant: len(token_ids) == prompt_len + num_generated, 0 <= num_generated <= max_tokens.
    """

    session_id: str
    token_ids: list[int]
    max_tokens: int
    num_draft_tokens: int
    eos_token_ids: frozenset[int]
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
    def will_draft(self) -> bool:
        """Whether any round can have a proposal: neither the first nor one with room for a single token does."""
        return self.num_draft_tokens > 0 and self.max_tokens > 2

    @property
    def state(self) -> SessionState:
        """What the session is doing."""
        if self.finish_reason is not None:
            return SessionState.FINISHED
        return SessionState.DECODING if self.num_generated else SessionState.PREFILLING

    def next_num_draft_tokens(self) -> int:
        """How many tokens are worth proposing now.

        None in the first round: the target prefills, and the first token must not wait for the draft. And never so
        many that full acceptance, with the bonus token, would go past max_tokens.
        """
        if self.num_generated == 0:
            return 0
        return min(self.num_draft_tokens, self.max_tokens - self.num_generated - 1)

    def commit(self, proposal: Sequence[int], num_accepted: int, next_token_id: int) -> Commit:
        """Append what a round gave: the accepted part of the proposal and the target's own next token.

        The text ends at the first end token, whether it was accepted or the target's own.
        """
        assert self.finish_reason is None
        assert 0 <= num_accepted <= len(proposal) < self.max_tokens - self.num_generated
        emitted = [*proposal[:num_accepted], next_token_id]
        end = next((i for i, token_id in enumerate(emitted) if token_id in self.eos_token_ids), None)
        if end is not None:
            del emitted[end + 1 :]
            self.finish_reason = FinishReason.STOP
        self.token_ids.extend(emitted)
        if self.finish_reason is None and self.num_generated == self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        own = len(emitted) > num_accepted
        full = num_accepted == len(proposal)
        return Commit(
            emitted,
            min(num_accepted, len(emitted)),
            recovered=own and not full,
            bonus=own and full,
            finish_reason=self.finish_reason,
        )
