"""What a stream brings: text, tokens with their source, and at the end the statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specd.client.schema import Schema, value_of
from specd.client.statistics import GenerationStatistics
from specd.errors import SpecdError
from specd.sampling import TokenLogProbabilities
from specd.text.chat import Reply
from specd.vocabulary import FinishReason, SourceCounts, TokenSource


@dataclass(frozen=True)
class CompletionToken:
    """A generated token, the text that it completes, and who said it first: the target or a source.

    The text is empty while a token ends inside a character, may begin a stop string, or is special.
    `log_probabilities` are there if they were asked for. `special_position` says of a special token how many characters
    of the text are before it. With log-probabilities, `own_bytes` are the token's own text. `margin` says how clearly
    the target chose it, None with acceptance by REJECTION; `near_tie` whether it was within the device's rounding.
    """

    id: int
    text: str
    source: TokenSource
    log_probabilities: TokenLogProbabilities | None = None
    special_position: int | None = None
    own_bytes: bytes = b""
    margin: float | None = field(default=None, compare=False)  # its last bits depend on the rounds
    near_tie: bool = False


@dataclass(frozen=True)
class RoundSummary:
    """The round that brought a Delta, or the sum of several: tokens, and where its time went in seconds."""

    proposed: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float
    sources: Mapping[TokenSource, SourceCounts]


@dataclass(frozen=True)
class Retrying:
    """The call was refused for now, or its stream broke; it goes on after a pause, behind the tokens that came."""

    error: SpecdError
    after_seconds: float


@dataclass(frozen=True)
class Loading:
    """The model is being loaded, and the generation begins when it is there.

    `process` is the one that starts, and `stage` what it does; both are empty while the model waits for memory. The
    bytes are those of a download.
    """

    process: str = ""
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0

    @property
    def words(self) -> str:
        """The progress in words, such as `target-worker coder: downloading 40 %`."""
        if not self.process:
            return "waiting for its workers"
        share = f" {self.done_bytes / self.total_bytes:.0%}".replace("%", " %") if self.total_bytes else ""
        return f"{self.process}: {self.stage}{share}"


@dataclass(frozen=True)
class Finished:
    """The end, why it came, and the stop string or stop token that ended the text, if one did."""

    reason: FinishReason
    statistics: GenerationStatistics
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Delta:
    """New text and tokens.

    The last one has the end, which also follows as an event of its own. The first one has the most tokens that there
    can be, the end of a conversation's prompt as the template wrote it, and with `echo` the tokens of the prompt.
    """

    text: str
    tokens: tuple[CompletionToken, ...]
    round: RoundSummary
    session_id: str = ""
    finished: Finished | None = None
    max_tokens: int = 0
    prompt_end: str = ""
    prompt_tokens: tuple[CompletionToken, ...] = ()


Event = Delta | Loading | Retrying | Finished


@dataclass(frozen=True)
class Completion:
    """All that a generation brought."""

    text: str
    tokens: Sequence[CompletionToken]
    finish_reason: FinishReason
    statistics: GenerationStatistics
    session_id: str
    seed: int
    stop_string: str | None = None
    stop_token_id: int | None = None
    schema: Schema | None = field(default=None, repr=False)
    reasoning_end: str = field(default="", repr=False)

    @property
    def parsed(self) -> Any:
        """The value of a text with a `schema`, an instance if that is a pydantic class; None without one.

        Raises ValueError for a text that the model did not end, such as one that `max_tokens` cut, and if the class
        refuses the value.
        """
        if self.schema is None:
            return None
        if self.finish_reason is not FinishReason.EOS:
            raise ValueError(
                f"the text is no whole value, because it ended by {self.finish_reason.value} after "
                f"{len(self.tokens)} tokens: set a larger max_tokens, and no stop conditions"
            )
        # A marker that is a special token is not in the text.
        places = [each.special_position for each in self.tokens[:-1] if each.special_position is not None]
        return value_of(self.text[max(places, default=0) :], self.schema, self.reasoning_end)

    @property
    def reply(self) -> Reply:
        """The text, with the special tokens in it."""
        placed = [(each.special_position, each.id) for each in self.tokens if each.special_position is not None]
        ends_with_token = self.finish_reason.is_token and self.tokens[-1].special_position is not None
        return Reply.of(self.text, placed, ends_with_token=ends_with_token)

    @property
    def token_ids(self) -> list[int]:
        """The ids of its tokens."""
        return [token.id for token in self.tokens]
