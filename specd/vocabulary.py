"""The words of the protocol that every part uses: why a generation ended, and where tokens come from."""

from __future__ import annotations

import enum


class FinishReason(enum.Enum):
    """Why a generation ended; generation.proto explains the values."""

    EOS = "eos"
    LENGTH = "length"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"

    @property
    def is_token(self) -> bool:
        """Whether the last token ended the generation, and is no part of what was said."""
        return self in {FinishReason.EOS, FinishReason.STOP_TOKEN}


class DraftSource(enum.Enum):
    """Who may propose tokens; generation.proto explains the values."""

    AUTO = "auto"
    MODEL = "model"
    LOOKUP = "lookup"
    NONE = "none"


class TokenSource(enum.Enum):
    """Who said a token first."""

    TARGET = "target"
    DRAFT = "draft"
    LOOKUP = "lookup"
