"""Grammars of requests and of sessions, as plain values."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from specd.errors import InvalidRequestError, about

MAX_GRAMMAR_BYTES = 2**16
# The reason of an error that ends a text, which the grammar cannot be followed any further in.
GRAMMAR_BROKEN = "GRAMMAR_BROKEN"
# The characters that Rust's regex-syntax escapes in its own `escape`. Python's re.escape also escapes white space.
_REGEX_MARKS = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")


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

    @classmethod
    def json_schema(cls, text: str) -> Grammar:
        """Return the grammar of the JSON texts that keep a schema, which is JSON text itself."""
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls(GrammarKind.JSON_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of the texts that match a regular expression (of Rust's regex-syntax) as a whole."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return the grammar that a text in llguidance's dialect of Lark defines."""
        return cls(GrammarKind.LARK, text)

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Grammar:
        """Return the grammar of exactly these texts."""
        return cls.regex("|".join(_REGEX_MARKS.sub(r"\\\g<0>", text) for text in texts))

    def check(self) -> None:
        """Raise InvalidRequestError for a grammar that is too long or empty."""
        num_bytes = len(self.text.encode(errors="surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                "OUT_OF_RANGE",
                f"grammar.{self.kind.value} has {num_bytes} bytes: it must have at most {MAX_GRAMMAR_BYTES}",
                metadata=about(f"grammar.{self.kind.value}", num_bytes, MAX_GRAMMAR_BYTES),
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
