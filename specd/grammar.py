"""Grammars of requests and of sessions, as plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from specd.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 2**16
# The reason of an error that ends a text, which the grammar cannot be followed any further in.
GRAMMAR_BROKEN = "GRAMMAR_BROKEN"


class GrammarKind(enum.Enum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    """A form that a text must have from its first to its last token. `text` is empty for JSON_OBJECT."""

    kind: GrammarKind
    text: str = ""

    def check(self) -> None:
        """Raise InvalidRequestError for a grammar that is too long or empty."""
        num_bytes = len(self.text.encode(errors="surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                "OUT_OF_RANGE",
                f"grammar.{self.kind.value} has {num_bytes} bytes: it must have at most {MAX_GRAMMAR_BYTES}",
            )
        if not self.text and self.kind is not GrammarKind.JSON_OBJECT:
            raise InvalidRequestError("OUT_OF_RANGE", f"grammar.{self.kind.value} is empty: send one, or no grammar")


@dataclass(frozen=True)
class ReasoningTokens:
    """The tokens that begin and end a model's reasoning; `begin` is None if a text may not begin it.

    `is_open` is whether the prompt has begun it already.
    """

    end: int
    begin: int | None = None
    is_open: bool = False


@dataclass(frozen=True)
class SessionGrammar:
    """A grammar of the tokens of a session from position `begins_at` on; with `reasoning`, of those behind it."""

    grammar: Grammar
    begins_at: int
    reasoning: ReasoningTokens | None = None
