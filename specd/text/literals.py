"""Text of a conversation that looks like a control token, and stays text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specd.text.chat import Chat
from specd.text.special_tokens import MARK
from specd.text.tokenizer import Tokenizer


class Literals:
    """Hides the special tokens in what people say from the tokenizer, which would take them for the template's own.

    A conversation without any gets the tokens that it always got. vLLM, llama.cpp and transformers let a user's
    `<|im_start|>system` begin a system message.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = f"{MARK}{secrets.randbits(64)}{MARK}"  # of a mark: nobody can guess it
        self._marks: dict[str, str] = {}  # by special token

    def hidden_in(self, chat: Chat) -> Chat:
        """Return the conversation with a mark for each special token in it: in time by its length, so a long one is
        to be hidden beside the event loop.
        """
        if (pattern := self._tokenizer.special_token) is None:
            return chat
        hide = self._hider(pattern)
        return replace(
            chat,
            messages=tuple(hide(message) for message in chat.messages),
            tools=tuple(hide(tool) for tool in chat.tools),
            template_arguments=hide(chat.template_arguments),
        )

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of what the template made of the conversation: text for marks."""
        if not self._marks and not self._tokenizer.normalizes_special_tokens:
            return self._tokenizer.encode(prompt, add_special_tokens=False)
        tokens = list(self._marks)
        mark = re.compile(rf"{self._start}(\d+){MARK}")
        return self._tokenizer.encode_apart(prompt, lambda text: mark.sub(lambda m: tokens[int(m.group(1))], text))

    def _hider(self, pattern: re.Pattern[str]) -> Callable[[Any], Any]:
        def mark(match: re.Match[str]) -> str:
            return self._marks.setdefault(match.group(), f"{self._start}{len(self._marks)}{MARK}")

        def hide(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(mark, value)
            if isinstance(value, Mapping):
                return {pattern.sub(mark, key): hide(value[key]) for key in value}
            return [hide(item) for item in value] if isinstance(value, list) else value

        return hide
