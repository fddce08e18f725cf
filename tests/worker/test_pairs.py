"""A head's pairs: after any feeds, guesses, rewinds and copies, they are those of the session's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache

from specd.worker.heads import recent_states
from specd.worker.heads.head import Head
from specd.worker.heads.pairs import Pairs

SIZE = 3


class RecordingHead(Head):
    """Its cache holds each pair as it was fed: the token as the key, the hidden state as the value."""

    size = SIZE
    fixed_shapes = False

    def __init__(self) -> None:
        Module.__init__(self)
        self.states: Any = SimpleNamespace(size=SIZE)
        self.layers = [Module()]
        self.batches = False

    def feed(self, pairs: Pairs, token_ids: Sequence[int], hidden: mx.array) -> None:
        assert hidden.shape == (len(token_ids), SIZE)
        cache: Any = pairs.layers.caches[0]
        keys = mx.array([[[[float(token)]] for token in token_ids]]).reshape(1, 1, -1, 1)
        cache.update_and_fetch(keys, hidden[None, None])
        pairs.layers.fed(len(token_ids))


def state_after(token_ids: Sequence[int]) -> list[float]:
    """Return the state at the last of these tokens, which depends on all of them."""
    digest = 7
    for token in token_ids:
        digest = (31 * digest + token) % 99991
    return [float(len(token_ids)), float(token_ids[-1]), float(digest)]


@dataclass
class Session:
    pairs: Pairs
    tokens: list[int] = field(default_factory=list)
    was_fed: bool = False  # since the last rewind
    longest_wait: int = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        states = [state_after(self.tokens[: len(self.tokens) - len(token_ids) + i + 1]) for i in range(len(token_ids))]
        logits = mx.zeros((len(token_ids), 5))
        self.pairs.saw(mx.concatenate([logits, mx.array(states)], axis=1))
        self.was_fed = True
        self.longest_wait = max(self.longest_wait, len(self.tokens) - self.pairs.end)

    def draft(self, head: RecordingHead, next_token: int, guesses: Sequence[int]) -> None:
        begin = max(min(self.pairs.end, len(self.tokens)) - 1, 0)
        tokens, hidden = self.pairs.missing([*self.tokens[begin:], next_token], begin)
        head.feed(self.pairs, tokens, hidden)
        self.pairs.fed(tokens)
        self.check([*self.tokens[1:], next_token])
        for guess in guesses:  # a chain of drafts; the next request rewinds it
            head.feed(self.pairs, [guess], mx.full((1, SIZE), -1.0))

    def check(self, seconds: Sequence[int]) -> None:
        """The pairs are whole up to the last state, and from the beginning, unless states were forgotten."""
        begin, end = self.pairs.begin, self.pairs.end
        assert end == len(self.tokens) == self.pairs.layers.num_fed + begin
        keys, values = (np.array(row).reshape(end - begin, -1) for row in self.pairs.layers.caches[0].rows)
        assert keys[:, 0].tolist() == list(seconds[begin:])
        assert values.tolist() == [state_after(self.tokens[: s + 1]) for s in range(begin, end)]
        if self.longest_wait <= recent_states.KEPT:
            assert begin == 0


@settings(max_examples=300)
@given(data=st.data())
def test_pairs_are_those_of_the_tokens(data: st.DataObject) -> None:
    tokens = st.integers(0, 3)
    head = RecordingHead()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "step", 4)  # so that buffers move with a few pairs
        patch.setattr(recent_states, "KEPT", 8)
        sessions = [Session(Pairs(head))]
        for _ in range(data.draw(st.integers(1, 14))):
            session = sessions[data.draw(st.integers(0, len(sessions) - 1))]
            match data.draw(st.sampled_from(["feed", "feed", "draft", "draft", "rewind", "copy"])):
                case "feed":
                    session.feed(data.draw(st.lists(tokens, min_size=1, max_size=6)))
                case "draft" if session.was_fed:
                    session.draft(head, data.draw(tokens), data.draw(st.lists(tokens, max_size=4)))
                case "rewind":
                    position = data.draw(st.integers(0, len(session.tokens)))
                    session.pairs.rewind(position)
                    del session.tokens[position:]
                    session.was_fed = False
                case "copy" if session.tokens:
                    position = data.draw(st.integers(1, len(session.tokens)))
                    copied = session.pairs.copy(position)
                    waited = max(session.longest_wait, 0)
                    sessions.append(Session(copied, session.tokens[:position], longest_wait=waited))


def test_the_memory_of_pairs_is_what_they_take() -> None:
    head: Any = RecordingHead()
    session = Session(Pairs(head))
    session.feed([1, 2, 3])
    session.draft(head, 1, [])
    session.pairs.rewind(2)
    assert [array.shape for array in session.pairs.arrays][-1] == (2, SIZE)
