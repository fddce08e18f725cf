"""Stop strings: the same end however the text is cut, and nothing shown that would have to be taken back."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specd.text.stop_strings import StopStrings


def expected(strings: list[str], text: str) -> tuple[str, str | None]:
    """The shown part of a whole text, and the stop string that ended it: the definition, word for word."""
    for end in range(1, len(text) + 1):
        if complete := [string for string in strings if text[:end].endswith(string)]:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def show(strings: list[str], pieces: list[str]) -> tuple[list[str], StopStrings]:
    stop = StopStrings(strings)
    shown = []
    for piece in pieces:
        shown.append(stop.push(piece))
        if stop.matched is not None:
            break
    return shown, stop


# Two letters make overlaps, and strings within strings, the rule.
strings_of = st.lists(st.text("ab", min_size=1, max_size=6), max_size=5)
pieces_of = st.lists(st.text("abc", max_size=6), max_size=12)


@given(strings_of, pieces_of)
@example(["abc", "b"], ["xab", "c"])
@example(["aab", "ab"], ["aaab"])
@example(["abab", "bb"], ["aba", "bb"])
def test_any_cut_shows_what_the_whole_text_says(strings: list[str], pieces: list[str]) -> None:
    shown, stop = show(strings, pieces)
    text, matched = expected(strings, "".join(pieces))
    assert stop.matched == matched
    assert "".join(shown) + stop.flush() == text
    assert stop.flush() == ""


@given(strings_of, pieces_of)
def test_held_back_is_the_longest_end_that_begins_a_stop_string_and_no_more(
    strings: list[str], pieces: list[str]
) -> None:
    stop = StopStrings(strings)
    text = shown = ""
    for piece in pieces:
        shown += stop.push(piece)
        if stop.matched is not None:
            return
        text += piece
        begun = (text[i:] for i in range(len(text)) if any(string.startswith(text[i:]) for string in strings))
        assert text == shown + next(begun, "")


@given(strings_of, pieces_of, st.text("abc", max_size=12))
def test_nothing_shown_is_taken_back_whatever_follows(strings: list[str], pieces: list[str], rest: str) -> None:
    shown, stop = show(strings, pieces)
    if stop.matched is None:
        assert expected(strings, "".join(pieces) + rest)[0].startswith("".join(shown))


@pytest.mark.parametrize(
    ("strings", "text", "shown", "matched"),
    [
        (["abc", "b"], "xabc", "xa", "b"),  # completes within a longer one that is under way
        (["b", "ab", "cab"], "xcab", "x", "cab"),  # complete together: the longest
        (["ab", "abc"], "xabc", "x", "ab"),  # complete earlier, though shorter
        (["aab"], "aaab", "a", "aab"),  # begins again within itself
        (["\n\n"], "one\n\n\ntwo", "one", "\n\n"),
        (["\N{SNOWMAN}"], "é\N{SNOWMAN}", "é", "\N{SNOWMAN}"),
        (["a", "a"], "ba", "b", "a"),
        (["User:"], "User", "User", None),
        ([], "anything", "anything", None),
    ],
)
def test_by_example(strings: list[str], text: str, shown: str, matched: str | None) -> None:
    for pieces in ([text], list(text)):
        parts, stop = show(strings, pieces)
        assert ("".join(parts) + stop.flush(), stop.matched) == (shown, matched)


def test_nothing_may_be_pushed_after_a_match() -> None:
    stop = StopStrings(["."])
    assert stop.push("One. Two.") == "One"
    with pytest.raises(AssertionError):
        stop.push("x")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(AssertionError):
        StopStrings(["a", ""])


def test_a_long_text_that_keeps_almost_matching_is_not_read_again_and_again() -> None:
    """64 strings of 256 characters, and a text that is inside all of them: quadratic work would take minutes."""
    strings = ["a" * (255 - i) + "b" + "c" * i for i in range(64)]
    stop = StopStrings(strings)
    num_shown = 0
    for pushed in range(1, 200_001):
        num_shown += len(stop.push("a"))
        assert pushed - num_shown <= 255
    assert stop.push("c") == "a" * 255 + "c"
    assert stop.push("a" * 300) == "a" * 45
    assert stop.push("b") == ""
    assert stop.matched == strings[0]
