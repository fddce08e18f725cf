"""Replies under a grammar by a model that knows nothing: it breaks what a good model hides."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from specd.matching.matcher import SessionMatcher
from specd.text.tokenizer import Tokenizer

EOS = 0
_ENDS = (b'"', b"}", b"]", b")", b"<")


def random_reply(
    following: SessionMatcher, own: Tokenizer, seed: int, *, begun: Sequence[int] = (), most: int = 300
) -> list[int]:
    """Return tokens, with the end token at the end if the model came to an end.

    It takes any allowed token, and every other time one that can end something, if there is one.
    """
    chance = random.Random(seed)
    token_ids = list(begun)
    following.follow(token_ids)
    while len(token_ids) < most and token_ids[-1:] != [EOS]:
        (mask,) = following.masks([])
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        assert len(allowed), own.decode(token_ids, skip_special_tokens=False)
        ending = [token_id for token_id in allowed if _ends(own, int(token_id))] if chance.random() < 0.5 else []
        token_ids.append(int(chance.choice(ending or list(allowed))))
        following.follow(token_ids[-1:], following.end)
    return token_ids


def _ends(own: Tokenizer, token_id: int) -> bool:
    return token_id in own.special_tokens or own.token_bytes.of(token_id)[:1] in _ENDS
