"""Text to tokens and back, with the target's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from tokenizers import Tokenizer as HuggingFaceTokenizer

from specd.text.chat import ChatTemplate
from specd.text.special_tokens import SecretNames, pattern_of
from specd.text.text_stream import TextStream
from specd.text.token_bytes import TokenBytes


class Tokenizer:
    """The tokenizer of a model, from the bytes of its tokenizer.json, and its chat template.

    Encoding, also of conversations, may be called from any thread, and should be: a megabyte of text takes a second.
    """

    def __init__(self, tokenizer_json: bytes, chat_template: ChatTemplate | None = None) -> None:
        self._tokenizer = HuggingFaceTokenizer.from_str(tokenizer_json.decode())
        # Some tokenizers have a truncation left over from training; a prompt is encoded whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special and token.content}
        # The tokens that text leaves out, by id.
        self.special_tokens = {token_id: token.content for token_id, token in special.items()}
        # A pattern that finds them in a text, if there are any: the longest, as the tokenizer does.
        self.special_token = pattern_of(self.special_tokens.values()) if special else None
        # Whether the tokenizer also finds some in another spelling, such as one in capitals.
        self.normalizes_special_tokens = any(token.normalized for token in special.values())
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
        """Return the tokens of `change(text)`, in which only the special tokens of `text` itself are real.

        Special tokens that `change` adds are text. All other tokens are as in `encode`. The first call copies the
        tokenizer.
        """
        return self._secret_names.encode(change(self._secret_names.written_in(text)))

    @cached_property
    def _secret_names(self) -> SecretNames:
        return SecretNames(self._tokenizer)

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

    def stream_text(self, prompt_ids: Sequence[int]) -> TextStream:
        """Return a stream that turns the tokens after a prompt into text."""
        return TextStream(self._tokenizer, self.token_bytes, self.special_tokens, prompt_ids)

    def difference(self, other: Tokenizer) -> str:
        """Return, for people, the first token in which this map from token to id differs from another."""
        own, others = (t._tokenizer.get_vocab(with_added_tokens=True) for t in (self, other))
        for token, token_id in sorted(own.items(), key=lambda item: item[1]):
            if others.get(token) != token_id:
                there = f"id {others[token]}" if token in others else "missing"
                return f"token {token!r} is id {token_id} in the one and {there} in the other"
        return f"the one has {len(own)} tokens and the other {len(others)}"
