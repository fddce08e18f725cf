"""Measure answers in a form: the cost of a grammar, and the gain of the tokens that it forces.

    python benchmarks/forms.py [--turns 5] [--schemas FILE]

The same requests in turns, one at a time, on the included pair, greedy: 64 tokens of plain text, without a grammar and
with one that allows any text, by the target alone and with four draft tokens; and a record with long keys, by the
target alone, with the sources that need no grammar, and with all. It prints medians of milliseconds a token, and for
the cost of a grammar the quartiles of the ratios within turns.

With a file of schemas, a JSON object with a `schema` in each line, it also prints how long they take to compile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

from specd.client import AsyncClient, Completion, Grammar
from specd.errors import InvalidRequestError
from specd.matching.vocabulary import GrammarVocabulary
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.text.tokenizer import Tokenizer

_PROMPTS = ("x = ", "# the settings as JSON\nsettings = ", "import json\nrecord = ", "class Stack:\n    def")
_NAMES = (
    "maximum_number_of_connections",
    "directory_for_temporary_files",
    "preferred_language_and_region",
    "contact_address_of_the_owner",
    "checksum_before_compression",
    "scheduled_maintenance_window",
)
_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 8} for name in _NAMES},
    "required": [*_NAMES],
    "additionalProperties": False,
}
_ANY = Grammar.regex(r"(.|\n)*")
_CASES: dict[str, dict[str, Any]] = {
    "plain, target alone": {"draft_source": "none", "max_tokens": 64},
    "any text, target alone": {"draft_source": "none", "max_tokens": 64, "grammar": _ANY},
    "plain, four draft tokens": {"num_draft_tokens": 4, "max_tokens": 64},
    "any text, four draft tokens": {"num_draft_tokens": 4, "max_tokens": 64, "grammar": _ANY},
    "record, target alone": {"draft_source": "none", "max_tokens": 400, "schema": _SCHEMA},
    "record, draft model": {"draft_source": "model", "max_tokens": 400, "schema": _SCHEMA},
    "record, look-up": {"draft_source": "lookup", "max_tokens": 400, "schema": _SCHEMA},
    "record, all sources": {"max_tokens": 400, "schema": _SCHEMA},
}


def _milliseconds(completion: Completion) -> float:
    return 1e3 * completion.statistics.decode_seconds / (completion.statistics.generated_tokens - 1)


async def measure(turns: int) -> dict[str, list[float]]:
    """Return the milliseconds a token by case, each by turn and prompt."""
    measured: dict[str, list[float]] = {name: [] for name in _CASES}
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT) as stack, AsyncClient(stack.address) as client:
        for turn in range(-1, turns):  # the first to warm up
            for number, prompt in enumerate(_PROMPTS):
                texts: dict[str, set[str]] = {}
                cases = [*_CASES.items()]
                for name, fields in cases if (turn + number) % 2 else reversed(cases):
                    completion = await client.generate(prompt, **fields).completion()
                    texts.setdefault(name.split(",")[0], set()).add(completion.text)
                    if turn >= 0:
                        measured[name].append(_milliseconds(completion))
                assert all(len(each) == 1 for each in texts.values()), texts
    return measured


def compile_times(path: Path) -> list[float]:
    """Return the processor times, in seconds, to compile the schemas of a file that can be enforced, sorted."""
    tokenizer = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes())
    vocabulary = GrammarVocabulary(tokenizer, size=tokenizer.vocabulary_size, eos_token_ids=[0])
    vocabulary.compile(Grammar.json_object())  # the first one also reads the vocabulary
    times: list[float] = []
    for line in path.read_text().splitlines():
        grammar = Grammar.json_schema(json.dumps(json.loads(line)["schema"]))
        begun = time.process_time()
        with contextlib.suppress(InvalidRequestError):
            vocabulary.compile(grammar)
            times.append(time.process_time() - begun)
    return sorted(times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--schemas", type=Path)
    arguments = parser.parse_args()
    if arguments.schemas is not None:
        times = compile_times(arguments.schemas)
        print(
            f"{len(times)} schemas compile in {1e3 * statistics.median(times):.1f} ms, 95 % of them in at most ", end=""
        )
        print(f"{1e3 * times[int(0.95 * len(times))]:.1f} ms")
    measured = asyncio.run(measure(arguments.turns))
    medians = {name: statistics.median(values) for name, values in measured.items()}
    for name, value in medians.items():
        print(f"{name:32} {value:7.2f} ms a token")
    for how in ("target alone", "four draft tokens"):
        pairs = zip(measured[f"any text, {how}"], measured[f"plain, {how}"], strict=True)
        low, median, high = statistics.quantiles((with_one / without for with_one, without in pairs), n=4)
        print(f"{how}: a grammar costs {median - 1:+.1%} (quartiles {low - 1:+.1%} to {high - 1:+.1%})")
    others = min(medians["record, draft model"], medians["record, look-up"], medians["record, target alone"])
    print(
        f"with forced tokens a record is {others / medians['record, all sources']:.2f} times as fast as with the best "
        "of the others"
    )


if __name__ == "__main__":
    main()
