"""Writes what `specd demo` prints into the README: python -m tests.e2e.readme_demo."""

from __future__ import annotations

import re
from pathlib import Path

from specd.cli.comparison import DEMO_PROMPT
from specd.cli.completion import LEGEND
from tests.e2e.processes import run_specd

README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"(?<=<!-- demo -->\n```\n).*?(?=```\n)", re.DOTALL)
_ANSWER_LINES = 2  # with the last one of the prompt


def block_in(readme: str) -> str:
    """Return the demo's output as the README shows it."""
    (block,) = _BLOCK.findall(readme)
    return str(block)


def shortened(stdout: str, stderr: str) -> str:
    """Return what the demo prints, with little of the text."""
    lines = [line.rstrip() for line in stdout.splitlines()]
    begin, end = lines.index(DEMO_PROMPT.splitlines()[-1]), lines.index(LEGEND.plain)
    shown = [*stderr.splitlines(), *lines[begin : begin + _ANSWER_LINES], "…", *lines[end:]]
    return "".join(f"{line}\n" for line in shown)


def without_numbers(block: str) -> str:
    """Return the block without what differs from run to run: numbers, and the spaces that align them."""
    return re.sub(r" +", " ", re.sub(r"\d+(\.\d+)?", "N", block))


def run_demo() -> str:
    """Run the demo; return its output, shortened."""
    done = run_specd("demo")
    assert done.returncode == 0, done.stderr
    return shortened(done.stdout, done.stderr)


if __name__ == "__main__":
    README.write_text(_BLOCK.sub(lambda _: run_demo(), README.read_text()))
