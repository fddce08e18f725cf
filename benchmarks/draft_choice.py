"""`--draft auto` on ten made-up families of models: which draft is chosen, and how long the choice takes.

Each family has a draft with another tokenizer, one that is too slow, and one that is best. The models of all families
are in one directory, and each choice is made in a process of its own: `python -m benchmarks.draft_choice`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_CHOOSE = """
import json, sys, time
from pathlib import Path
from specd.cli.pairs.chooser import DraftChooser

started_at = time.perf_counter()
chooser = DraftChooser(sys.argv[1], [Path(sys.argv[2])])
remembered = chooser.recall()
choice = remembered or chooser.choose(chooser.find().fitting)
seconds = time.perf_counter() - started_at
worths = {each.candidate.name: each.worth and vars(each.worth) for each in choice.ranked}
print(json.dumps({"draft": choice.setting, "remembered": bool(remembered), "seconds": seconds, "worths": worths}))
"""
_SAVE = """
import sys
from pathlib import Path
from tests.worker.draft_families import save_family

save_family(Path(sys.argv[1]), int(sys.argv[2]))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each family, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", type=int, nargs="+", default=range(10), help="numbers of families")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        directory = Path(name)
        places = {"XDG_CACHE_HOME": str(directory / "cache"), "HF_HUB_CACHE": str(directory / "hub")}
        environment = {**os.environ, **places, "SPECD_LOG_LEVEL": "error"}
        models = directory / "models"
        for number in options.families:
            _run(_SAVE, environment, models, number)
        for number in options.families:
            first, again = (_run(_CHOOSE, environment, models / f"target-{number}", models) for _ in range(2))
            right = Path(first["draft"]).name == Path(again["draft"]).name == f"best-{number}"
            results.append({"family": number, "right": right, "first": first, "again": again})
            print(
                f"family {number}: {Path(first['draft']).name} in {first['seconds']:.1f} s, then in "
                f"{again['seconds']:.3f} s{'' if again['remembered'] else ', not remembered'}: {_worths(first)}"
            )
    longest = {which: max(each[which]["seconds"] for each in results) for which in ("first", "again")}
    print(f"the best is chosen in {sum(each['right'] for each in results)} of {len(results)} families")
    print(f"at most {longest['first']:.1f} s at first use and {longest['again']:.3f} s afterwards")
    if options.json is not None:
        options.json.write_text(json.dumps({"longest_seconds": longest, "families": results}, indent=1) + "\n")


def _run(program: str, environment: dict[str, str], *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout or "{}")
    return result


def _worths(result: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {own['acceptance']:.0%} accepted, {own['speedup']:.2f}x" if own else f"{name} no result"
        for name, own in result["worths"].items()
    )


if __name__ == "__main__":
    main()
