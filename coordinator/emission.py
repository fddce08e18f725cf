"""The output of a generation for its client, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.core import Round
from coordinator.output import EmittedToken
from coordinator.telemetry.statistics import SessionStatistics
from specd.vocabulary import FinishReason


@dataclass(frozen=True)
class Beginning:
    """The beginning of a generation: a digest for its resumption, and if requested, its tokens and its source.

    `max_tokens` is the most tokens that it may have. For a conversation, `prompt_end` is the end of the prompt, as the
    template wrote it. `prompt_tokens` are its echo.
    """

    prompt_fingerprint: str
    max_tokens: int
    prompt_end: str = ""
    prompt_token_ids: Sequence[int] = ()
    source_token_ids: Sequence[int] = ()
    prompt_tokens: Sequence[EmittedToken] = ()


@dataclass(frozen=True)
class Emission:
    """The output of one round for the client.

    The first emission has the beginning; the last one has a finish reason, and the stop string if one ended the text.
    """

    session_id: str
    seed: int
    tokens: list[EmittedToken]
    round: Round
    statistics: SessionStatistics
    stop_string: str | None = None
    beginning: Beginning | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why this emission is the last, if it is. The session itself may be rounds ahead."""
        return self.round.commit.finish_reason
