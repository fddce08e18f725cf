"""The own bytes of each token of a vocabulary."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")

# How ByteLevel tokenizers write the bytes: as the characters of Latin-1 that can be seen, the others from 256 on.
_SEEN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTES = {chr(byte): byte for byte in _SEEN} | {
    chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _SEEN)
}


class TokenBytes:
    """The own bytes of a tokenizer's tokens, special ones included; a character can be split between tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = set(_kinds(json.loads(tokenizer.decoder.__getstate__()))) if tokenizer.decoder is not None else set()
        self.is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}  # at most the vocabulary

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token: none for an id that no token has."""
        if token_id not in self._known:
            self._known[token_id] = self._bytes(token_id)
        return self._known[token_id]

    def by_itself(self, written: str) -> bytes | None:
        """Return the bytes of a token as written in the vocabulary, or None if they depend on the tokens around it."""
        if self.is_byte_level:
            # Like the decoder: a token with other characters than these is text.
            return bytes(map(_BYTES.__getitem__, written)) if _BYTES.keys() >= set(written) else written.encode()
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(written)):
            return bytes.fromhex(byte[1])
        return None

    def _bytes(self, token_id: int) -> bytes:
        written = self._tokenizer.id_to_token(token_id)
        if written is None:
            return b""
        if (own := self.by_itself(written)) is not None:
            return own
        # Decoders remove a space from the first token, so the second of two is whole.
        once, twice = (self._tokenizer.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        return (twice[len(once) :] if twice.startswith(once) else once).encode()


def _kinds(decoder: dict[str, Any]) -> list[str]:
    return [decoder["type"], *(kind for each in decoder.get("decoders", ()) for kind in _kinds(each))]
