"""Words of the protocol that all parts use: finish reasons, and the sources of tokens."""

from __future__ import annotations

import enum


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


class DraftSource(enum.Enum):
    """The sources that may propose tokens; generation.proto explains the values."""

    AUTO = "auto"
    MODEL = "model"
    LOOKUP = "lookup"
    NONE = "none"


class TokenSource(enum.Enum):
    """The source that proposed a token, or the target."""

    TARGET = "target"
    DRAFT = "draft"
    LOOKUP = "lookup"
