"""This checkout beside another commit, on the same requests in turns: whether a change made specd slower.

    git worktree add ../before COMMIT
    python benchmarks/commits.py ../before [-k 3] [--target MODEL --draft MODEL] [--turns 5] [--json FILE]

Both services run all the time, with the packages of this environment. Each learns for itself, from nothing. A cell is a
number of sessions and a temperature, with k draft tokens and with k that the planner chooses. A ratio is this checkout
over the other one, the median over the turns. Exit code 1 if the tokens differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from service_pair import compare, parser_of

from specd.supervisor import Stack


def main() -> int:
    """Measure, print a table and return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("other", type=Path, help="a checkout of the other commit")
    options = parser.parse_args()
    if not (options.other / "specd").is_dir():
        parser.error(f"{options.other} is no checkout of specd")
    checkouts = {"other": options.other.resolve(), "this": Path(__file__).resolve().parents[1]}
    with tempfile.TemporaryDirectory() as directory:
        stacks = {
            name: Stack(
                target=options.target,
                draft=options.draft,
                environment={
                    "PYTHONPATH": str(checkout),
                    "PYTHONSAFEPATH": "1",  # the current directory would come first
                    "XDG_CACHE_HOME": f"{directory}/{name}",
                },
            )
            for name, checkout in checkouts.items()
        }
        return compare(stacks, options)


if __name__ == "__main__":
    sys.exit(main())
