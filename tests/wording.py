"""Count phrases that a stranger has to read twice, and fail when one becomes more frequent: `python -m tests.wording`.

The text of every source and document is searched, so that error messages and `--help` count like docstrings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_SUFFIXES = (".py", ".md", ".proto", ".toml", ".yml", ".yaml", ".sh", ".js", ".html", "Makefile", "Dockerfile")
# Generated stubs, texts of others, and the pages that quote the phrases.
_LEFT_OUT = ("specd/v1/", "tests/data/", "models/", "requirements.lock")
_QUOTING = ("tests/wording.py", "tests/unit/test_wording.py")

# What stands between two words of one phrase: the end of a line, with a comment's mark or the quotes of a long string.
_GAP = r"(?:[ \t]|\n[ \t]*(?:#|//)?[ \t]*|\"\n[ \t]*f?\")+"


@dataclass(frozen=True)
class Idiom:
    """A phrase, its pattern, the words to use instead, and how often it may still occur."""

    name: str
    pattern: str
    instead: str
    most: int

    def places(self, text: str) -> list[int]:
        """Return the offsets at which `text` has the phrase."""
        return [found.start() for found in re.finditer(self.pattern.replace(" ", _GAP), text)]


IDIOMS = (
    Idiom("a sentence that begins with 'Of'", r"\bOf\b(?! course)", "put the subject first", 9),
    Idiom("is none, are none", r"(?<!there\s)\b(?:is|are|was|were|be) none\b", "'is not a ...', 'is invalid'", 5),
    Idiom("so many", r"\bso (?:many|much|long)\b(?! as)", "name the number", 16),
    Idiom("go on", r"\b(?:go|goes|going|gone|went) on\b", "continue", 14),
    Idiom("whoever", r"\b[Ww](?:ho|hom|hat|hich|here)ever\b", "any, every, the caller", 7),
    Idiom("however many", r"\b[Hh]owever (?:many|much|long|large|often|few)\b", "any number of", 1),
    Idiom("of those", r"\b[Oo]f those\b", "repeat the noun", 4),
    Idiom("says why", r"\b[Ss](?:ay|ays|aid|aying) (?:of|wh\w+|how)\b", "report, return", 20),
    Idiom("a docstring of 'What'", r"\"\"\"(?:Wh(?!ether)\w+|How)\b", "the noun", 43),
    Idiom("of what", r"\b(?:[Oo]f|from|by|to|for|with|in|than|as|[Tt]hat|is|are) what\b", "the noun", 53),
    Idiom("anew", r"\b[Aa]new\b", "again", 5),
    Idiom("in place of", r"\b[Ii]n place of\b", "instead of", 4),
    Idiom("give way", r"\b[Gg](?:ive|ives|ave|iven|iving) way\b", "yield", 0),
    Idiom("take in", r"\b[Tt](?:ake|akes|ook|aking) in\b", "accept, add", 8),
    Idiom("of before", r"\bof before\b", "earlier, previous", 0),
    Idiom("besides", r"\b[Bb]esides\b", "also", 5),
    Idiom("meanwhile", r"\b[Mm]eanwhile\b", "during it", 1),
    Idiom("nobody", r"\b(?:[Nn]o|[Ss]ome|[Ee]very)body\b", "the role: client, worker, peer", 18),
    Idiom("whose", r"\bwhose\b|\bof whom\b", "two sentences", 107),
    Idiom("See LayerCache", r"\"\"\"See \w+\.\"\"\"", "nothing: an override needs no docstring", 0),
)  # fmt: skip


def texts() -> dict[str, str]:
    """Return the searched files by path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    chosen = [path for path in listed if path.endswith(_SUFFIXES) and not path.startswith(_LEFT_OUT)]
    return {path: (_ROOT / path).read_text() for path in chosen if path not in _QUOTING and (_ROOT / path).exists()}


def main() -> None:
    """Print the count of each phrase, and the places of those that occur too often."""
    searched = texts()
    shown, failed = set(sys.argv[1:]), False
    for idiom in IDIOMS:
        places = [(path, offset) for path, text in searched.items() for offset in idiom.places(text)]
        too_many = len(places) > idiom.most
        failed |= too_many
        if too_many or idiom.name in shown:
            for path, offset in places:
                line = searched[path].count("\n", 0, offset) + 1
                print(f"{path}:{line}: {idiom.name}: {searched[path].splitlines()[line - 1].strip()[:90]}")
            print(
                f"'{idiom.name}' occurs {len(places)} times; the most is {idiom.most}. Write instead: {idiom.instead}."
            )
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
