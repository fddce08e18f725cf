"""Text of a conversation that looks like a control token, but stays text.

Marks that cannot be guessed replace such text while the template is rendered. Then the marks become the original
characters, and the text is encoded by a copy of the tokenizer in which the real special tokens have secret names. So
all other tokens are the usual ones, and neither a vocabulary nor a merge leads to a typed special token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specd.errors import InvalidRequestError
from specd.text.chat import Chat
from specd.text.special_tokens import MARK
from specd.text.tokenizer import Tokenizer

# In a conversation: a mark is longer than what it hides, and far fewer fill the longest context.
MAX_LITERALS = 2**16


class Literals:
    """Hides special tokens in users' text from the tokenizer, which could not tell them from the template's own.

    A conversation without such text gets the same tokens as with transformers. vLLM, llama.cpp and transformers let a
    user's `<|im_start|>system` begin a system message.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = f"{MARK}{secrets.randbits(64)}{MARK}"  # the start of a mark, which cannot be guessed
        self._marks: dict[str, str] = {}  # by special token

    def hidden_in(self, chat: Chat) -> Chat:
        """Return the conversation with marks for text that looks like special tokens, and for its special tokens.

        It takes time by its length, so a long conversation must not be hidden on the event loop. Raises
        InvalidRequestError (OUT_OF_RANGE) for more than MAX_LITERALS look-alikes, and for special tokens that the
        tokenizer does not have, or that are outside of their message.
        """
        check_special_tokens(chat, self._tokenizer)
        if (pattern := self._tokenizer.special_token) is None:
            return chat
        hide = self._hider(pattern)
        messages = [hide(message) for message in chat.messages]
        for number, tokens in chat.special_tokens.items():
            content = chat.messages[number].get("content") or ""
            starts = [0, *(position for position, _ in tokens)]
            parts = [hide(content[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]
            texts = [*(self._tokenizer.special_tokens[token_id] for _, token_id in tokens), ""]
            messages[number]["content"] = "".join(map("".join, zip(parts, texts, strict=True)))
        return replace(
            chat,
            messages=tuple(messages),
            tools=tuple(hide(tool) for tool in chat.tools),
            template_arguments=hide(chat.template_arguments),
            special_tokens={},
        )

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of the rendered conversation, with text instead of marks."""
        if not self._marks and not self._tokenizer.normalizes_special_tokens:
            return self._tokenizer.encode(prompt, add_special_tokens=False)
        tokens = list(self._marks)
        mark = re.compile(rf"{self._start}(\d+){MARK}")
        return self._tokenizer.encode_apart(prompt, lambda text: mark.sub(lambda m: tokens[int(m.group(1))], text))

    def _hider(self, pattern: re.Pattern[str]) -> Callable[[Any], Any]:
        num_hidden = 0

        def mark(match: re.Match[str]) -> str:
            nonlocal num_hidden
            num_hidden += 1
            if num_hidden > MAX_LITERALS:
                most = f"the conversation has more than {MAX_LITERALS} texts that are names of special tokens"
                raise InvalidRequestError("OUT_OF_RANGE", f"{most}: send fewer")
            return self._marks.setdefault(match.group(), f"{self._start}{len(self._marks)}{MARK}")

        def hide(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(mark, value)
            if isinstance(value, Mapping):
                return {pattern.sub(mark, key): hide(value[key]) for key in value}
            return [hide(item) for item in value] if isinstance(value, list) else value

        return hide


def check_special_tokens(chat: Chat, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequestError unless the special tokens of a conversation exist, in order, inside their messages."""
    for number, tokens in chat.special_tokens.items():
        content, before = chat.messages[number].get("content") or "", 0
        for position, token_id in tokens:
            if token_id not in tokenizer.special_tokens:
                why = f"the token {token_id}, which is not a special token"
            elif not before <= position <= len(content):
                why = f"a token at {position}, which is out of order or behind the {len(content)} characters of content"
            else:
                before = position
                continue
            raise InvalidRequestError("OUT_OF_RANGE", f"chat.messages[{number}].special_tokens has {why}")
