"""The patterns of tests/wording.py find the phrases that they are for, and leave plain ones alone."""

import pytest

from tests.wording import IDIOMS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Of verifies, the level follows soon.", ["a sentence that begins with 'Of'"]),
        ("Of course, the level follows soon.", []),
        ("confidences that are none", ["is none, are none"]),
        ("0 where there is none", []),
        ("# a phase of so\n    # many clients", ["so many"]),
        ('raise Error(\n        f"{name} cannot go "\n        f"on")', ["go on"]),
        ("so long as a session runs", []),
        ('"""What a step computes."""', ["a docstring of 'What'"]),
        ('"""See LayerCache."""', ["See LayerCache"]),
        ("The planner learns from rounds.", []),
    ],
)
def test_a_phrase_is_found(text: str, found: list[str]) -> None:
    """Also where the end of a line or of a string stands between two of its words."""
    assert [idiom.name for idiom in IDIOMS if idiom.places(text)] == found
