"""Who may propose a session's tokens, and who did."""

from __future__ import annotations

import enum


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
