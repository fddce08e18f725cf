"""The boundary between the reasoning and the answer of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specd.grammar import Grammar, ReasoningTokens, SessionGrammar
from specd.lark import LarkGrammar
from specd.text.tokenizer import Tokenizer

# The last tokens of a prompt that can begin the reasoning: room for a header of the reply and a tag.
PROMPT_END_TOKENS = 16
# Line breaks that models write behind their reasoning, in Lark.
_LINE_BREAKS = '"\\n"{0,2}'


@dataclass(frozen=True)
class ReasoningMarkers:
    """The text that begins the reasoning of a reply, "" if none is needed, and the text that ends it.

    Special tokens count as text.
    """

    begin: str
    end: str


def reply_grammar(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], grammar: Grammar, markers: ReasoningMarkers | None
) -> SessionGrammar:
    """Return the grammar of the reply to a prompt, with an answer behind the reasoning in the form of `grammar`.

    Markers that are single tokens leave the reasoning free. Otherwise the reasoning is a part of the grammar: a text
    without special tokens, which the end marker ends. Raises ValueError if that is too long.
    """
    begins_at = len(prompt_ids)
    if markers is None:
        return SessionGrammar(grammar, begins_at)
    is_open = _is_begun(tokenizer, prompt_ids, markers)
    begin, end = (_only_token(tokenizer, marker) for marker in (markers.begin, markers.end))
    if end is not None and (is_open or begin is not None):
        return SessionGrammar(grammar, begins_at, ReasoningTokens(end, begin, is_open))
    lark = LarkGrammar(tokenizer.special_tokens)
    reasoning = f"{lark.text_to(markers.end)} {_LINE_BREAKS}"
    if not is_open:
        reasoning = f"({lark.literal(markers.begin)} {reasoning})?"
    return SessionGrammar(Grammar.lark(lark.written(f"{reasoning} {lark.form(grammar)}")), begins_at)


def _only_token(tokenizer: Tokenizer, text: str) -> int | None:
    token_ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    return token_ids[0] if len(token_ids) == 1 else None


def _is_begun(tokenizer: Tokenizer, prompt_ids: Sequence[int], markers: ReasoningMarkers) -> bool:
    """Return whether the prompt has begun the reasoning."""
    prompt_end = tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return prompt_end.rstrip().endswith(markers.begin)


class AnswerSearch:
    """Separates the answer of a reply from the reasoning before it, while the tokens come.

    The reasoning begins the reply, or the prompt has begun it, and the white space behind it belongs to it. A reply
    without reasoning is all answer. Text is held while it may be the beginning of a marker at the reply's beginning.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], markers: ReasoningMarkers) -> None:
        self._special_tokens = tokenizer.special_tokens
        self._markers = markers
        self._is_undecided = not _is_begun(tokenizer, prompt_ids, markers)
        self._is_in_answer = False
        self._is_behind_reasoning = False  # with only white space since
        self._seen = ""  # the undecided text, special tokens included
        self._held: list[str] = []

    def push(self, token_id: int, text: str) -> tuple[str, str]:
        """Return the reasoning and the answer in the text that a token completes."""
        return self._split(self._special_tokens.get(token_id, text), text)

    def finish(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the answer in the remaining text at the end of a reply."""
        reasoning, answer = self._split(text, text)
        return reasoning, answer + self.release()

    def release(self) -> str:
        """Return the held text, and forget it."""
        held, self._held = "".join(self._held), []
        return held

    def _split(self, seen: str, text: str) -> tuple[str, str]:
        if self._is_in_answer:
            return self._behind_reasoning("", text) if self._is_behind_reasoning else ("", text)
        self._seen += seen
        if self._is_undecided:
            self._held.append(text)
            begun = self._seen = self._seen.lstrip()
            if len(begun) < len(self._markers.begin) and self._markers.begin.startswith(begun):
                return "", ""
            self._is_undecided, text = False, self.release()
            if not begun.startswith(self._markers.begin):
                self._is_in_answer = True
                return "", text
            self._seen = begun.removeprefix(self._markers.begin)
        end = self._markers.end
        if (at := self._seen.find(end)) < 0:
            self._seen = self._seen[-(len(end) - 1) :] if len(end) > 1 else ""
            return text, ""
        self._is_in_answer = self._is_behind_reasoning = True
        # A special token has no text beside its marker.
        num_behind = min(len(self._seen) - at - len(end), len(text))
        return self._behind_reasoning(text[: len(text) - num_behind], text[len(text) - num_behind :])

    def _behind_reasoning(self, reasoning: str, answer: str) -> tuple[str, str]:
        said = answer.lstrip()
        self._is_behind_reasoning = not said
        return reasoning + answer[: len(answer) - len(said)], said
