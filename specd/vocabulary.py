"""Words of the protocol that all parts use: finish reasons, and the sources of tokens."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


class FinishReason(enum.Enum):
    """The reason why a generation ended; generation.proto explains the values."""

    EOS = "eos"
    LENGTH = "length"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"

    @property
    def is_token(self) -> bool:
        """Whether the last token ended the generation, and is not part of the reply."""
        return self in {FinishReason.EOS, FinishReason.STOP_TOKEN}


class TokenSource(enum.Enum):
    """Who said a token first: the target itself, or a source of draft tokens. Their order chooses the page's colours.

    Look-up proposes PREDICTION, too.
    """

    TARGET = "target"
    DRAFT = "draft"
    LOOKUP = "lookup"
    PREDICTION = "prediction"
    FORCED = "forced"

    @property
    def label(self) -> str:
        """Its name for people."""
        return {TokenSource.DRAFT: "draft model", TokenSource.LOOKUP: "look-up"}.get(self, self.value)


# The name of the draft in a target that is the head in the target's own files.
OWN_HEAD = "auto"
# The value of `--draft` with which look-up alone proposes.
LOOKUP_ALONE = "lookup"

# The sources of draft tokens.
PROPOSERS = tuple(source for source in TokenSource if source is not TokenSource.TARGET)


@dataclass(frozen=True)
class SourceCounts:
    """Tokens that a source proposed, and those of them that were accepted and emitted."""

    proposed: int = 0
    accepted: int = 0


def sums_by_source(
    one: Mapping[TokenSource, SourceCounts], other: Mapping[TokenSource, SourceCounts]
) -> dict[TokenSource, SourceCounts]:
    """Return the sums of counts by source."""
    sums = dict(one)
    for source, counts in other.items():
        before = sums.get(source, SourceCounts())
        sums[source] = SourceCounts(before.proposed + counts.proposed, before.accepted + counts.accepted)
    return sums


# A DraftSource by its value, where a caller may write it.
DraftSourceName = Literal["auto", "model", "lookup", "none"]


class DraftSource(enum.Enum):
    """The sources that may propose tokens; generation.proto explains the values."""

    AUTO = "auto"
    MODEL = "model"
    LOOKUP = "lookup"
    NONE = "none"

    @property
    def sources(self) -> tuple[TokenSource, ...]:
        """The sources that may propose; look-up reads the client's prediction, too."""
        return {
            DraftSource.AUTO: PROPOSERS,
            DraftSource.MODEL: (TokenSource.DRAFT,),
            DraftSource.LOOKUP: (TokenSource.LOOKUP, TokenSource.PREDICTION),
            DraftSource.NONE: (),
        }[self]
