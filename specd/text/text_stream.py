"""The text of tokens as they come.

tokenizers' own `DecodeStream` decodes all tokens without text again with each of them, and fails where tokens of byte
fallback are not text.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from specd.text.token_bytes import TokenBytes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_EACH_BYTE = "specd.replace-each-byte"  # what byte fallback does, where byte-level decoding joins some


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TextStream:
    """Turns tokens into text as they come, whole characters at a time, in constant time for each.

    The texts of all tokens and of `finish` together equal decoding all tokens at once. There is one exception: where
    tokens of byte fallback are not text, decoding removes the characters right before them, which are shown by then.
    Bytes that cannot become a character are shown as replacement characters as soon as that is known.
    """

    # Decoding needs only the part of the prompt that can share a character, or a leading space, with later tokens.
    _CONTEXT_TOKENS = 4

    def __init__(
        self, tokenizer: Tokenizer, token_bytes: TokenBytes, special_ids: Collection[int], prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace" if token_bytes.is_byte_level else _EACH_BYTE)
        self._last: list[int] = []  # the last token that has text
        self._already_shown = ""
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if self._written(token_id) is not None:
                context.append(token_id)
                if len(context) == self._CONTEXT_TOKENS:
                    break
        for token_id in reversed(context):
            self.push(token_id)
        # A prompt that ends inside a character was shown with replacement characters for it.
        held = self._utf8.getstate()
        self._already_shown = self._utf8.decode(b"", final=True)
        self._utf8.setstate(held)

    def push(self, token_id: int) -> str:
        """Return the text that a token completes; empty while it ends inside a character."""
        written = self._written(token_id)
        if written is None:
            return ""
        data = self._token_bytes.by_itself(written)
        if data is not None:
            text = self._utf8.decode(data)
        else:
            text = self._utf8.decode(b"", final=True) + self._behind_last(token_id)
        self._last = [token_id]
        return self._new(text)

    def finish(self) -> str:
        """Return the held bytes of an incomplete character, as replacement characters."""
        return self._new(self._utf8.decode(b"", final=True))

    def _written(self, token_id: int) -> str | None:
        """Return a token as written in the vocabulary; None for one without text, which is special or unknown."""
        return None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)

    def _behind_last(self, token_id: int) -> str:
        """Return the text that a token adds to that of the previous one."""
        before = self._decode(self._last)
        both = self._decode([*self._last, token_id])
        return both[len(before) :] if both.startswith(before) else self._decode([token_id])

    def _new(self, text: str) -> str:
        if text and self._already_shown:
            text, self._already_shown = text.removeprefix(self._already_shown), ""
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
