"""The tokens that a session already has for a text, instead of the tokenizer's choice."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence

from specd.text.tokenizer import Tokenizer


def with_kept_tokens(tokenizer: Tokenizer, before: Sequence[int], now: list[int]) -> list[int]:
    """Return the tokens of a text, with the tokens of the session `before` as far as both have the same text.

    A model need not choose the tokenizer's tokens for a reply, and a cache belongs to tokens. The two are compared from
    one special token to the next; the special tokens must be the same, so that `before` adds none.
    """
    special = tokenizer.special_tokens
    same = next((i for i, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), None)
    start = min(len(before), len(now)) if same is None else same
    while start and now[start - 1] not in special:
        start -= 1
    tokens, i, j = now[:start], start, start
    while True:
        kept, own = _run(before, i, special), _run(now, j, special)
        lead = tokens[-1:]  # decoders remove a space from the first token
        said = tokenizer.decode([*lead, *kept], skip_special_tokens=False)
        num_said = _num_tokens(tokenizer, lead, own, said)
        if num_said is None:
            return [*tokens, *now[j:]]
        tokens += kept
        i, j = i + len(kept), j + num_said
        if num_said < len(own) or i >= len(before) or j >= len(now) or before[i] != now[j]:
            return [*tokens, *now[j:]]
        tokens.append(now[j])
        i, j = i + 1, j + 1


def _run(token_ids: Sequence[int], start: int, special: Container[int]) -> list[int]:
    """Return the tokens up to the next special one."""
    end = next((i for i in range(start, len(token_ids)) if token_ids[i] in special), len(token_ids))
    return list(token_ids[start:end])


def _num_tokens(tokenizer: Tokenizer, lead: list[int], own: list[int], text: str) -> int | None:
    """Return the number of tokens behind `lead` that have this text, or None if it ends inside a token."""

    def said(number: int) -> str:
        return tokenizer.decode([*lead, *own[:number]], skip_special_tokens=False)

    if said(len(own)) == text:
        return len(own)
    number = bisect_left(range(len(own)), len(text), key=lambda number: len(said(number)))
    return number if said(number) == text else None
