"""Stop strings look at the answer of a reply, not at the reasoning before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from coordinator.core import Commit, Proposal, Round, Verdict
from coordinator.output import Output
from specd.settings import EMBEDDED_TARGET
from specd.text.reasoning import ReasoningMarkers
from specd.text.tokenizer import Tokenizer
from specd.vocabulary import FinishReason


def _tokenizer() -> Tokenizer:
    tokenizer = HuggingFaceTokenizer.from_str((Path(EMBEDDED_TARGET) / "tokenizer.json").read_text())
    tokenizer.add_special_tokens(["[THINK]", "[/THINK]", "<|channel|>"])
    return Tokenizer(tokenizer.to_str().encode())


TOKENIZER = _tokenizer()
TAGS = ReasoningMarkers("<think>", "</think>")
SPECIAL = ReasoningMarkers("[THINK]", "[/THINK]")
HARMONY = ReasoningMarkers("", "<|channel|>final")
STOPS = ["ab", "b</", "<think", "xyz", "\n"]


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def shown(prompt: str, token_ids: list[int], sizes: list[int], **options: object) -> tuple[str, str | None]:
    """Return what is shown of a reply that comes in rounds, and the stop string that ended it."""
    output = Output(TOKENIZER, encoded(prompt), **options)  # type: ignore[arg-type]
    text, at = "", 0
    for size in [*sizes, len(token_ids)]:
        new = token_ids[at : at + size]
        at += size
        if not new:
            continue
        is_last = at >= len(token_ids)
        commit = Commit(new, 0, finish_reason=FinishReason.EOS if is_last else None)
        round_, tokens = output.take(Round(Proposal(), Verdict(0, new[-1]), commit, 0.0, 0.0))
        text += "".join(token.text for token in tokens)
        if round_.commit.finish_reason is FinishReason.STOP_STRING:
            assert output.stop_string is not None
            break
    return text, output.stop_string


def without_special(text: str) -> str:
    return TOKENIZER.decode(encoded(text), skip_special_tokens=True)


texts = st.text("abcxyz <>/\n", max_size=20)
rounds = st.lists(st.integers(1, 4), max_size=20)


@given(st.sampled_from([(TAGS, ""), (TAGS, "said <think>\n"), (SPECIAL, ""), (HARMONY, "")]), texts, texts, rounds)
def test_only_the_answer_is_searched(
    form: tuple[ReasoningMarkers, str], reasoning: str, answer: str, sizes: list[int]
) -> None:
    markers, prompt = form
    begin = "" if prompt else markers.begin
    before = f"{begin}{reasoning}{markers.end}"
    token_ids = [*encoded(before), *encoded(answer)]
    said = answer.lstrip()
    alone = shown("x", encoded(said), sizes, stop_strings=STOPS) if said else ("", None)
    assert shown(prompt or "x", token_ids, sizes, stop_strings=STOPS, reasoning=markers) == (
        without_special(before) + answer[: len(answer) - len(said)] + alone[0],
        alone[1],
    )


@given(texts, rounds)
def test_a_reply_without_reasoning_is_all_answer(reply: str, sizes: list[int]) -> None:
    token_ids = encoded(f"c{reply}")
    for markers in (TAGS, SPECIAL):
        expected = shown("x", token_ids, sizes, stop_strings=STOPS)
        assert shown("x", token_ids, sizes, stop_strings=STOPS, reasoning=markers) == expected


@given(texts, texts, rounds)
def test_a_resumed_reply_ends_where_the_whole_one_does(reasoning: str, answer: str, sizes: list[int]) -> None:
    token_ids = encoded(f"<think>{reasoning}</think>c{answer}")
    whole = shown("x", token_ids, sizes, stop_strings=STOPS, reasoning=TAGS)
    num_had = len(encoded(f"<think>{reasoning}</think>"))
    output = Output(TOKENIZER, encoded("x"), stop_strings=STOPS, reasoning=TAGS)
    text = output.resume(token_ids[:num_had])
    rest = token_ids[num_had:]
    commit = Commit(rest, 0, finish_reason=FinishReason.EOS)
    _, tokens = output.take(Round(Proposal(), Verdict(0, rest[-1]), commit, 0.0, 0.0))
    assert (text + "".join(token.text for token in tokens), output.stop_string) == whole


@pytest.mark.parametrize("reply", ["<th", "<think>ab", "  ", "<think>ab</thi"])
def test_what_is_held_at_the_beginning_is_shown_at_the_end(reply: str) -> None:
    assert shown("x", encoded(reply), [1] * 9, stop_strings=["ab"], reasoning=TAGS) == (reply, None)


def test_without_a_search_nothing_is_held() -> None:
    assert shown("x", encoded("<th ab"), [1] * 9, stop_strings=["ab"], reasoning=TAGS, min_tokens=50) == (
        "<th ab",
        None,
    )
