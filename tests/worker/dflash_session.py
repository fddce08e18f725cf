"""A session of a target with a block drafter, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from specd.worker.heads.dflash.head import DFlashHead
from specd.worker.layers.session_layers import SessionLayers
from tests.worker.driving import finish


class Session:
    """A session of a target and its head. Its passes and jobs run one by one."""

    def __init__(self, head: DFlashHead) -> None:
        self.head = head
        self.layers = SessionLayers(head.states.network)
        self.context = head.begin()
        self.text: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> None:
        """Feed tokens to the target."""
        _, hidden = self.head.states.run(mx.array([token_ids]), self.layers.caches)
        self.layers.fed(len(token_ids))
        self.context.saw(hidden[0])
        self.text += token_ids

    def read(self, next_token: int) -> None:
        """Let the head read the target's states, as a prefill does."""
        finish(self.context.read(*self.unread(next_token)))

    def draft(self, next_token: int, num_draft_tokens: int) -> tuple[list[int], np.ndarray[Any, Any]]:
        """Return drafted tokens, the likeliest or not, and their logits [n, rows]."""
        rows = [finish(self.context.first_logits(self.layers, *self.unread(next_token), num_draft_tokens))]
        drafted: list[int] = []
        for i in range(num_draft_tokens):
            drafted.append(int(mx.argsort(rows[-1][0])[-1 - i % 3]))
            if i + 1 < num_draft_tokens:
                rows.append(finish(self.context.next_logits(mx.array(drafted[-1:]))))
        return drafted, np.array(mx.concatenate(rows).astype(mx.float32))

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position`."""
        self.layers.rewind(position)
        self.context.rewind(position)
        del self.text[position:]

    def unread(self, next_token: int) -> tuple[list[int], int]:
        """Return the tokens behind the states that the head has not read, and the position of the first token."""
        position = max(min(self.context.end, len(self.text)) - 1, 0)
        return [*self.text[position:], next_token], position
