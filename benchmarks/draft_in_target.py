"""A target that drafts itself beside a draft worker, on the same requests in turns.

    python benchmarks/draft_in_target.py [-k 3] [--target MODEL --draft MODEL] [--turns 5] [--json FILE]

Each cell is a number of sessions and a temperature, with k draft tokens and with k that the planner chooses. Both
services run all the time, and each has a target worker of its own. A ratio is the median over the turns.
Exit code 1 if the tokens differ.
"""

from __future__ import annotations

import sys
import tempfile

from service_pair import compare, parser_of

from specd.supervisor import Stack


def main() -> int:
    """Measure, print a table and return the exit code."""
    options = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as cache:
        stacks = {
            name: Stack(
                target=options.target,
                draft=draft,
                options={"target-worker": {"self_draft": own}},
                environment={"XDG_CACHE_HOME": cache},
            )
            for name, draft, own in (("draft worker", options.draft, "none"), ("in the target", "", options.draft))
        }
        return compare(stacks, options)


if __name__ == "__main__":
    sys.exit(main())
