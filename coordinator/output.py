"""The output of a session's rounds for the client: tokens, whole characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.core import Round
from specd.errors import InvalidRequestError
from specd.sampling import Margin, TokenLogProbabilities
from specd.text.chat import PlacedToken, Reply
from specd.text.reasoning import AnswerSearch, ReasoningMarkers
from specd.text.stop_strings import StopStrings
from specd.text.text_stream import TextStream
from specd.text.token_bytes import TokenBytes
from specd.text.tokenizer import Tokenizer
from specd.vocabulary import FinishReason, TokenSource


@dataclass(frozen=True)
class EmittedToken:
    """A token, the text that it completes, and its source.

    If requested, it has its log-probabilities, and the own bytes of all tokens. `special_position` is the number of
    characters of the text before a special token in a reply. `margin` is there if the target sent it.
    """

    token_id: int
    text: str
    source: TokenSource
    log_probabilities: TokenLogProbabilities | None = None
    token_bytes: TokenBytes | None = None
    special_position: int | None = None
    margin: Margin | None = None


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], log_probabilities: Sequence[TokenLogProbabilities] | None = None
) -> list[EmittedToken]:
    """Return the tokens of a prompt with the text that each completes.

    `log_probabilities`, if they were asked for, begin with those of the second token. There can be more than tokens.
    """
    own = tokenizer.token_bytes if log_probabilities is not None else None
    text = tokenizer.stream_text(())
    tokens = [
        EmittedToken(token_id, text.push(token_id), TokenSource.TARGET, token_bytes=own) for token_id in token_ids
    ]
    tokens[-1] = replace(tokens[-1], text=tokens[-1].text + text.finish())
    for i, values in enumerate((log_probabilities or ())[: len(tokens) - 1], 1):
        tokens[i] = replace(tokens[i], log_probabilities=values)
    return tokens


class Output:
    """Turns the rounds of a session into tokens and text for its client, in order.

    The texts of all tokens together equal decoding all tokens at once, up to the first stop string. Stop strings do not
    count in the first `min_tokens` tokens, nor in the reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop_strings: Sequence[str] = (),
        reasoning: ReasoningMarkers | None = None,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._text: TextStream = tokenizer.stream_text(prompt_ids)
        self._stop = StopStrings(stop_strings) if stop_strings else None
        self._answer = AnswerSearch(tokenizer, prompt_ids, reasoning) if stop_strings and reasoning else None
        self._num_unsearched = min_tokens
        self._num_characters = 0  # before the next token, with those that are not shown yet
        self._special_tokens: list[PlacedToken] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stop.matched if self._stop is not None else None

    def resume(self, token_ids: Sequence[int]) -> str:
        """Continue behind tokens that the client has, and return their text.

        Raises InvalidRequestError if they contain a stop string, which would have ended the generation.
        """
        texts = []
        for token_id in token_ids:
            texts.append(self._push(token_id)[0])
            self._num_unsearched -= 1
            if self.stop_string is not None:
                raise InvalidRequestError(
                    "CONTRADICTION",
                    f"resumption has the stop string {self.stop_string!r}, which ends the text: nothing comes after it",
                    for_log="resumption has a stop string, which ends the text: nothing comes after it",
                )
        return "".join(texts)

    def take(self, round_: Round) -> tuple[Round, list[EmittedToken]]:
        """Return the tokens of the next round, and the round, which a stop string can have cut."""
        tokens: list[EmittedToken] = []
        sources = round_.sources
        for i, token_id in enumerate(round_.commit.token_ids):
            tokens.append(self._emit(round_, i, sources[i], *self._push(token_id)))
            self._num_unsearched -= 1
            if self.stop_string is not None:
                return round_.cut(i + 1, FinishReason.STOP_STRING), tokens
        if round_.commit.finish_reason is not None:
            # The held text may still end with a stop string, or can no longer become one.
            rest = self._search(None, self._text.finish())
            if self.stop_string is not None:
                round_ = round_.cut(len(tokens), FinishReason.STOP_STRING)
            elif self._stop is not None:
                rest += self._stop.flush()
            tokens[-1] = replace(tokens[-1], text=tokens[-1].text + rest)
        return round_, tokens

    def reply(self, text: str, last: EmittedToken, finish_reason: FinishReason) -> Reply:
        """Return the reply, at its end: all shown text, and the special tokens in it."""
        ends_with_token = last.special_position is not None and finish_reason.is_token
        return Reply.of(text, self._special_tokens, ends_with_token=ends_with_token)

    def _push(self, token_id: int) -> tuple[str, int | None]:
        """Return the text to show after a token, and for a special token the number of characters before it."""
        position = None
        if token_id in self._tokenizer.special_tokens:
            position = self._num_characters
            self._special_tokens.append((position, token_id))
        text = self._text.push(token_id)
        self._num_characters += len(text)
        return self._search(token_id, text), position

    def _search(self, token_id: int | None, text: str) -> str:
        """Return the text that can be shown after a token, or the end, has completed `text`."""
        if self._stop is None:
            return text
        reasoning = ""
        if self._answer is not None:
            search = self._answer
            reasoning, text = search.finish(text) if token_id is None else search.push(token_id, text)
            if self._num_unsearched > 0:
                text += search.release()
        return reasoning + (text if self._num_unsearched > 0 else self._stop.push(text))

    def _emit(
        self, round_: Round, i: int, source: TokenSource, text: str, special_position: int | None
    ) -> EmittedToken:
        values, margins = round_.verdict.log_probabilities, round_.margins
        return EmittedToken(
            round_.commit.token_ids[i],
            text,
            source,
            values[i] if values else None,
            self._tokenizer.token_bytes if values else None,
            special_position,
            margins[i] if margins else None,
        )
