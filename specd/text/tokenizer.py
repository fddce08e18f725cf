"""Text to tokens and back, with the target's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property

from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.decoders import DecodeStream

from specd.text.chat import Chat, ChatTemplate
from specd.text.token_bytes import TokenBytes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


class Tokenizer:
    """The tokenizer of a model, from the bytes of its tokenizer.json, and its chat template.

    Encoding, also of conversations, may be called from any thread, and should be: a megabyte of text takes a second.
    """

    def __init__(self, tokenizer_json: bytes, chat_template: ChatTemplate | None = None) -> None:
        self._tokenizer = HuggingFaceTokenizer.from_str(tokenizer_json.decode())
        # Left over from training in some; a prompt is taken as it is.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = [token for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        # The longest first, as the tokenizer looks for them.
        texts = sorted((token.content for token in special if token.content), key=len, reverse=True)
        self.special_token = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.template = chat_template or ChatTemplate()

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id of a token."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the model expects in front unless told not to."""
        # A batch of one, because `encode` holds the interpreter lock and would stop the other threads too.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_apart(self, text: str, change: Callable[[str], str]) -> list[int]:
        """Return the tokens of a text whose special tokens are meant, with what `change` makes of the text between.

        That has none, whatever it looks like. It is encoded piece by piece.
        """
        assert self.special_token is not None
        token_ids: list[int] = []
        end = 0
        for match in (*self.special_token.finditer(text), None):
            between = text[end : match.start() if match is not None else len(text)]
            if between:
                token_ids += self._literal.encode(change(between), add_special_tokens=False).ids
            if match is not None:
                token_id = self._tokenizer.token_to_id(match.group())
                assert token_id is not None
                token_ids.append(token_id)
                end = match.end()
        return token_ids

    @cached_property
    def _literal(self) -> HuggingFaceTokenizer:
        """The same tokenizer, to which a special token in a text is text."""
        literal = HuggingFaceTokenizer.from_str(self._tokenizer.to_str())
        literal.encode_special_tokens = True
        return literal

    def encode_chat(self, chat: Chat) -> list[int]:
        """Return the tokens of a conversation as the model's chat template writes it, special tokens included.

        Raises what ChatTemplate.render raises.
        """
        return self.encode(self.template.render(chat), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens, with replacement characters for incomplete ones."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The own bytes of each token, by id."""
        return TokenBytes(self._tokenizer)

    @property
    def chat_template(self) -> str:
        """The source of the chat template; empty if there is none."""
        return self.template.source

    @property
    def special_tokens(self) -> dict[int, str]:
        """The tokens that text leaves out, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def stream_text(self, prompt_ids: Sequence[int]) -> TextStream:
        """Start turning what comes after a prompt into text."""
        return TextStream(self._tokenizer, prompt_ids)

    def difference(self, other: Tokenizer) -> str:
        """Say for people in which token this map from token to id first differs from another."""
        own, others = (t._tokenizer.get_vocab(with_added_tokens=True) for t in (self, other))
        for token, token_id in sorted(own.items(), key=lambda item: item[1]):
            if others.get(token) != token_id:
                there = f"id {others[token]}" if token in others else "missing"
                return f"token {token!r} is id {token_id} in the one and {there} in the other"
        return f"the one has {len(own)} tokens and the other {len(others)}"


class TextStream:
    """Turns tokens into text as they come, whole characters at a time.

    The texts of all tokens and of `finish` together are what decoding all tokens at once gives.
    """

    # Of the prompt, decoding needs only what can share a character, or a leading space, with what follows.
    _CONTEXT_TOKENS = 16

    def __init__(self, tokenizer: HuggingFaceTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []
        # A DecodeStream forgets a context that ends inside a character, and then gives it out as new text. So it gets
        # the context up to there, the rest is pushed, and what the rest shows as already is cut off.
        context = list(prompt_ids[-self._CONTEXT_TOKENS :])
        end = len(context)
        while end and self._decode(context[:end]).endswith(_REPLACEMENT):
            end -= 1
        self._stream = DecodeStream(ids=context[:end], skip_special_tokens=True)
        self._already_shown = ""
        for token_id in context[end:]:
            self._already_shown = _REPLACEMENT
            self._stream.step(tokenizer, token_id)

    def push(self, token_id: int) -> str:
        """Return the text that a token completes; empty while it ends inside a character."""
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            self._held.append(token_id)
            return ""
        self._held.clear()
        if self._already_shown:
            text, self._already_shown = text.lstrip(self._already_shown), ""
        return text

    def finish(self) -> str:
        """Return what is held back of an incomplete character, as replacement characters."""
        held, self._held = self._held, []
        return self._decode(held) if held else ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
