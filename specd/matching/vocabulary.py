"""The vocabulary of a model for llguidance, and grammars compiled for it."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from specd.errors import InvalidRequestError
from specd.grammar import Grammar, GrammarKind
from specd.json_text import Room, parse_json
from specd.text.tokenizer import Tokenizer

# Grammars are compiled on this thread. A large one takes half a second of a core.
compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")

_MOST_CHARACTERS = 300  # of an error
_MOST_VALUES, _MOST_LEVELS = 2**15, 64  # of a schema
# White space between the tokens of JSON: a space, or one or two line breaks with an indentation, as in llama.cpp. A
# weak model would write more of it for ever.
_JSON: Any = {"whitespace_pattern": r"\x20|\x0A{1,2}[\x20\x09]{0,40}"}


class _Tokens:
    """A tokenizer in the form that llguidance reads (its class TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, size: int, unseen: Collection[int]) -> None:
        """No text has the tokens in `unseen`, nor those that are special."""
        own_bytes = tokenizer.token_bytes.of
        self.eos_token_id = eos_token_id
        self.tokens = [b"" if token_id in unseen else own_bytes(token_id) for token_id in range(size)]
        self.special_token_ids = [token_id for token_id in tokenizer.special_tokens if token_id < size]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False)


class GrammarVocabulary:
    """Compiles grammars for the tokens of a model. Its methods may be called on any thread, and take milliseconds."""

    def __init__(self, tokenizer: Tokenizer, *, size: int, eos_token_ids: Collection[int]) -> None:
        """`size` is the number of tokens of the model; only tokens below it can be chosen."""
        self._tokenizer = tokenizer
        self.size = size
        self._ends = sorted(token_id for token_id in eos_token_ids if token_id < size)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end a text. One that is not special has a text, which would be behind the form."""
        return [token_id for token_id in self._ends if token_id in self._tokenizer.special_tokens] or self._ends

    @cached_property
    def _tokens(self) -> LLTokenizer:
        # Takes up to a second for a large vocabulary, so it waits for the first grammar.
        if not self.eos_token_ids:
            raise InvalidRequestError(
                "CONTRADICTION", "the request has a grammar, but the model has no end token to end it: leave it out"
            )
        own = _Tokens(self._tokenizer, self.eos_token_ids[0], self.size, {*self._ends} - {*self.eos_token_ids})
        return LLTokenizer(own, n_vocab=self.size, eos_token=self.eos_token_ids)  # type: ignore[arg-type]

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher at the beginning of a text.

        Raises InvalidRequestError (BAD_GRAMMAR), in llguidance's words, for a grammar that it cannot keep: one with an
        error, with a keyword that it does not enforce, without any text, or one that is too large.
        """
        # Each session compiles its own: most take a millisecond, and a copy would share the limits of its original.
        grammar.check()
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            _check_json(grammar.text)
        try:
            matcher = LLMatcher(self._tokens, _definition(grammar), log_level=0)
        except ValueError as error:
            raise _bad(grammar, str(error)) from error
        if matcher.is_error():
            raise _bad(grammar, matcher.get_error())
        matcher.compute_bitmask()  # shows whether there is any text
        if matcher.is_stopped() and not matcher.is_accepting():
            raise _bad(grammar, "no text matches it")
        return matcher


def _check_json(text: str) -> None:
    """Raise InvalidRequestError unless a text is JSON. llguidance would report places in a text of its own."""
    try:
        parse_json(text.encode(), Room(_MOST_VALUES, _MOST_VALUES, _MOST_LEVELS))
    except ValueError as error:  # also for a half of a surrogate pair
        message = f"grammar.json_schema {error}"
        raise InvalidRequestError("BAD_GRAMMAR", message, for_log="grammar.json_schema is no JSON") from error


def _definition(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON)
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def _bad(grammar: Grammar, why: str) -> InvalidRequestError:
    shown = " ".join(why.split())
    shown = shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]}…"
    message = f"grammar.{grammar.kind.value} cannot be kept: {shown}"
    return InvalidRequestError("BAD_GRAMMAR", message, for_log=f"grammar.{grammar.kind.value} cannot be kept")
