"""Tokens of conversations, without the bounds and the literals of the coordinator."""

from __future__ import annotations

from specd.text.chat import Chat
from specd.text.tokenizer import Tokenizer


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Return the tokens of a conversation as the model's chat template writes it, special tokens included."""
    return tokenizer.encode(tokenizer.template.render(chat), add_special_tokens=False)
