"""An estimate of the prompts that a target has in its prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 64


def blocks_of(
    token_ids: Sequence[int], *, namespace: bytes, source: Sequence[int] = (), adapter: str = ""
) -> tuple[bytes, ...]:
    """Return a digest for each whole block of a prompt, which depends on all tokens before its end.

    Prompts of different namespaces, sources or adapters share no block, as they share no cached prefix. It takes about
    a microsecond for each block, so it belongs beside the event loop.
    """
    root = hashlib.sha256(namespace).digest() + hashlib.sha256(adapter.encode()).digest()
    digest = hashlib.blake2b(root + array("I", source).tobytes(), digest_size=16)
    data, blocks = array("I", token_ids).tobytes(), []
    size = BLOCK_TOKENS * array("I").itemsize
    for start in range(0, len(data) - size + 1, size):
        digest.update(data[start : start + size])
        blocks.append(digest.digest())
    return tuple(blocks)


@dataclass(frozen=True)
class CachedPart:
    """The number of a prompt's first tokens that are probably cached, and when the last of them was last used."""

    num_tokens: int = 0
    last_use: int = 0


class PrefixEstimate:
    """The blocks of the prompts that were sent to a target: the latest ones, as many as its prefix cache can hold."""

    def __init__(self, max_tokens: Callable[[], int]) -> None:
        """`max_tokens` returns the size of the target's prefix cache."""
        self._max_tokens = max_tokens
        self._num_uses = 0
        self._last_uses: OrderedDict[bytes, int] = OrderedDict()  # the least recent first

    def find(self, blocks: Sequence[bytes]) -> CachedPart:
        """Return the part of a prompt that is probably cached."""
        part = CachedPart()
        for i, block in enumerate(blocks, start=1):
            if (last_use := self._last_uses.get(block)) is None:
                break
            part = CachedPart(i * BLOCK_TOKENS, last_use)
        return part

    def add(self, blocks: Sequence[bytes]) -> None:
        """Note a prompt that is sent to the target."""
        self._num_uses += 1
        for block in reversed(blocks):  # so that the ends of prompts are forgotten first
            self._last_uses[block] = self._num_uses
            self._last_uses.move_to_end(block)
        while len(self._last_uses) > max(self._max_tokens() // BLOCK_TOKENS, len(blocks)):
            self._last_uses.popitem(last=False)

    def correct(self, part: CachedPart, num_reused: int) -> None:
        """Note how many tokens of a prompt a target has reused.

        If it has forgotten most of them, it has also forgotten all prompts that were last used before.
        """
        if 2 * num_reused >= part.num_tokens:  # some caches can be reused only from certain positions
            return
        while self._last_uses and next(iter(self._last_uses.values())) <= part.last_use:
            self._last_uses.popitem(last=False)

    def clear(self) -> None:
        """Forget all prompts, because the target has restarted."""
        self._last_uses.clear()
