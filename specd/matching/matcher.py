"""A grammar over the tokens of one session, which grow and are rewound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher

from specd.errors import CacheTooShortError, InvalidRequestError
from specd.grammar import GRAMMAR_BROKEN, SessionGrammar
from specd.matching.vocabulary import GrammarVocabulary

Mask = np.ndarray[tuple[int], np.dtype[np.uint8]]  # a bit for each token, the lowest first


class ForbiddenTokenError(InvalidRequestError):
    """A session has a token that its grammar forbids."""

    def __init__(self, token_id: int, position: int) -> None:
        super().__init__(GRAMMAR_BROKEN, f"the grammar forbids token {token_id} at position {position}")


@contextmanager
def chosen_by_target() -> Iterator[None]:
    """Explain a forbidden token among those that a target has chosen: other parameters left it no token.

    Raises InvalidRequestError (GRAMMAR_BROKEN).
    """
    try:
        yield
    except ForbiddenTokenError as error:
        raise InvalidRequestError(
            GRAMMAR_BROKEN,
            f"{error}, because other parameters, such as min_tokens, forbid all that it allows: leave one out",
        ) from error


class SessionMatcher:
    """Says which tokens may come next in a session. It is a function of the session's tokens alone.

    Not safe on several threads at once. A mask takes about 20 microseconds, and milliseconds for a new place of a
    difficult grammar.
    """

    def __init__(self, vocabulary: GrammarVocabulary, grammar: SessionGrammar) -> None:
        """Compile the grammar. Raises InvalidRequestError (BAD_GRAMMAR)."""
        self._matcher: LLMatcher = vocabulary.compile(grammar.grammar)
        self._begins_at = grammar.begins_at
        self._reasoning = grammar.reasoning
        self._eos = frozenset(vocabulary.eos_token_ids)
        self._num_bytes = (vocabulary.size + 7) // 8
        self._tokens: list[int] = []  # from `begins_at` on
        # The first of them that the grammar is about; None within the reasoning.
        self._begin: int | None = self._first()
        self._masked = 0  # the number of tokens before the latest mask that llguidance has computed

    @property
    def end(self) -> int:
        """The position behind the session's tokens."""
        return self._begins_at + len(self._tokens)

    def follow(self, token_ids: Sequence[int], position: int = 0) -> None:
        """Follow a session with these tokens from `position` on, behind its earlier ones, to its end.

        Raises ForbiddenTokenError, InvalidRequestError (GRAMMAR_BROKEN) if the grammar is too large, and
        CacheTooShortError if the tokens before `position` are not all known.
        """
        first = max(position - self._begins_at, 0)
        if first > len(self._tokens):
            raise CacheTooShortError(position, self.end)
        new = list(token_ids[max(self._begins_at - position, 0) :])
        same = 0
        while same < min(len(new), len(self._tokens) - first) and new[same] == self._tokens[first + same]:
            same += 1
        self._rewind(first + same)
        for token_id in new[same:]:
            if not self._append(token_id):
                raise ForbiddenTokenError(token_id, self.end)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens, from the first, the grammar allows. No token follows an end token."""
        end = len(self._tokens)
        num_allowed = 0
        for token_id in token_ids:
            if not self._append(token_id):
                break
            num_allowed += 1
        self._rewind(end)
        return num_allowed

    def masks(self, proposal: Sequence[int], *, follows: bool = False) -> list[Mask | None]:
        """Return the masks of the next token and of the one behind each proposed token.

        None allows all tokens: within reasoning, and behind a token that the grammar forbids, which is not accepted.
        If it `follows`, the session then has the proposed tokens, up to the first that is forbidden.
        Raises InvalidRequestError (GRAMMAR_BROKEN) where the grammar is too large.
        """
        end = len(self._tokens)
        masks = [self._mask()]
        for token_id in proposal:
            if not self._append(token_id):
                break
            masks.append(self._mask())
        if not follows:
            self._rewind(end)
        return masks + [None] * (len(proposal) + 1 - len(masks))

    def forced(self) -> list[int]:
        """Return the tokens of the text that the grammar leaves no choice about."""
        if self._is_free or self._ended:
            return []
        return list(self._matcher.compute_ff_tokens())

    @property
    def _is_free(self) -> bool:
        return self._begin is None

    @property
    def _reasoning_begin(self) -> int | None:
        """The token that may begin reasoning now."""
        return self._reasoning.begin if self._reasoning is not None and not self._tokens else None

    @property
    def _ended(self) -> bool:
        return bool(self._tokens) and not self._is_free and self._tokens[-1] in self._eos

    def _first(self) -> int | None:
        return None if self._reasoning is not None and self._reasoning.is_open else 0

    def _append(self, token_id: int) -> bool:
        """Follow one more token, if it is allowed."""
        assert not self._matcher.is_error()
        if self._is_free:
            assert self._reasoning is not None
            self._tokens.append(token_id)
            if token_id == self._reasoning.end:
                self._begin = len(self._tokens)
            return True
        if self._ended:
            return False
        if token_id == self._reasoning_begin:
            self._begin = None
        elif token_id in self._eos:
            if not self._matcher.is_accepting():
                return False
        elif self._matcher.is_stopped():
            return False
        elif self._matcher.try_consume_tokens([token_id]) != 1:
            self._check()
            return False
        self._tokens.append(token_id)
        return True

    def _rewind(self, num_tokens: int) -> None:
        """Forget all tokens but the first ones."""
        gone = self._tokens[num_tokens:]
        if not gone:
            return
        begin = self._begin
        del self._tokens[num_tokens:]
        if begin is None or num_tokens < begin:
            self._matcher.reset()
            self._begin = None if self._tokens else self._first()
        else:
            self._matcher.rollback(sum(token_id not in self._eos for token_id in gone))
        if num_tokens < self._masked and not self._matcher.is_stopped():
            # llguidance keeps its latest mask through a rollback, and returns it for another text that has as many
            # lexemes and the same state of the lexer. The mask of this place replaces it.
            self._compute_mask()

    def _mask(self) -> Mask | None:
        if self._is_free:
            return None
        if self._ended:
            return self._only(())
        if self._matcher.is_stopped():
            mask = self._only(self._eos)
        else:
            mask = np.frombuffer(self._compute_mask(), np.uint8)[: self._num_bytes].copy()
        if (begin := self._reasoning_begin) is not None:
            mask |= self._only((begin,))
        return mask

    def _compute_mask(self) -> bytes:
        self._masked = len(self._tokens)
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def _check(self) -> None:
        """Raise InvalidRequestError (GRAMMAR_BROKEN) if llguidance has met one of its limits."""
        if self._matcher.is_error():
            why = " ".join(self._matcher.get_error().partition("<state>")[0].split())
            raise InvalidRequestError(
                GRAMMAR_BROKEN,
                f"the grammar is too large to be followed beyond position {self.end}: {why}",
            )

    def _only(self, token_ids: Sequence[int] | frozenset[int]) -> Mask:
        mask = np.zeros(self._num_bytes, np.uint8)
        for token_id in token_ids:
            mask[token_id // 8] |= 1 << token_id % 8
        return mask
