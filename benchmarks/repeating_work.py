"""Prompts whose answers repeat them, and ones whose answers do not: four kinds of work for look-up.

A small model of code does not follow instructions. So each prompt shows the beginning of the answer, and the model
continues it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from specd.bench.prompts import load_prompts

_LINES = 60  # of a file, so that the answer, too, fits into a context of 2,048 tokens
_RENAMED = ("self", "other", "value", "name", "items", "result", "path", "key", "data", "index", "line", "count")
_PEOPLE = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jun", "Kai", "Lena", "Mats", "Nora")
_TOWNS = ("Basel", "Cork", "Delft", "Essen", "Gent", "Hull", "Jena", "Kiel", "Lund", "Metz", "Oslo", "Porto", "Riga")
_WORDS = ("lamp", "chair", "table", "shelf", "clock", "mirror", "carpet", "vase", "stool", "bench", "frame", "desk")


def _files() -> list[list[str]]:
    """Return twelve files by lines, cut to a length that leaves room for the answer."""
    texts = list(load_prompts().values())[2:]
    return [text.splitlines()[:_LINES] for text in sorted(texts, key=len)[-14:-2]]


def edits() -> list[str]:
    """A file, and the beginning of the same file with a name changed."""
    prompts = []
    for number, lines in enumerate(_files()):
        name = _RENAMED[number]
        edited = [line.replace(name, f"{name}_") for line in lines[: max(len(lines) // 4, 6)]]
        before, after = "\n".join(lines), "\n".join(edited)
        prompts.append(f"# before.py\n{before}\n\n\n# after.py, with {name} renamed to {name}_\n{after}")
    return prompts


def quotes() -> list[str]:
    """A file, and the beginning of a quotation from its middle."""
    prompts = []
    for number, lines in enumerate(_files()):
        begin = len(lines) // 6 + number
        quoted = "\n".join(lines[begin : begin + 4])
        prompts.append("\n".join(lines) + f'\n\n\n# Quoted from above:\n"""\n{quoted}')
    return prompts


def tables() -> list[str]:
    """A table in CSV, and the first records of it in JSON."""
    prompts = []
    for seed in range(12):
        rng = random.Random(seed)
        rows = [
            {
                "name": rng.choice(_PEOPLE),
                "town": rng.choice(_TOWNS),
                "product": rng.choice(_WORDS),
                "price": round(rng.uniform(1, 99), 2),
                "quantity": rng.randint(1, 40),
            }
            for _ in range(14)
        ]
        names = rng.sample(list(rows[0]), 4)
        rows = [{name: row[name] for name in names} for row in rows]
        table = "\n".join([",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)])
        records = ",\n".join("    " + json.dumps(row) for row in rows[:3])
        prompts.append(f'TABLE = """\\\n{table}\n"""\n\n# The same as JSON:\nRECORDS = [\n{records},\n')
    return prompts


def free_code() -> list[str]:
    """Code to continue, which is not in the prompt."""
    return list(load_prompts().values())[2:14]


KINDS: dict[str, Callable[[], list[str]]] = {
    "edit": edits,
    "quote": quotes,
    "json": tables,
    "free code": free_code,
}
