"""The options of `specd generate` for the form of a text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specd.supervisor import Stack
from tests.e2e.processes import complaint, run_specd

PROMPT = "def fibonacci(n):"


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--regex", "[a-c]{3}"], "[a-c]{3}"),
        (["--schema", "FILE"], "true|false"),
        (["--lark", "FILE"], "left|right"),
    ],
)
def test_generate_keeps_a_form(stack: Stack, tmp_path: Path, options: list[str], pattern: str) -> None:
    file = tmp_path / "form"
    file.write_text('{"type": "boolean"}' if "--schema" in options else 'start: "left" | "right"')
    options = [str(file) if option == "FILE" else option for option in options]
    done = run_specd("generate", PROMPT, *options, "--address", stack.address)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(pattern, done.stdout.strip())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--schema", "FILE"], "form is not JSON: Expecting property name"),
        (["--schema", "FILE", "--regex", "a"], "is not JSON"),
        (["--lark", "FILE", "--regex", "a"], "leave out all but one of --schema, --regex and --lark"),
        (["--regex", ""], "grammar.regex is empty"),
        (["--regex", "a" * 70_000], "it must have at most 65536"),
    ],
)
def test_generate_refuses_a_wrong_form_before_it_calls(tmp_path: Path, options: list[str], says: str) -> None:
    file = tmp_path / "form"
    file.write_text("{x")
    options = [str(file) if option == "FILE" else option for option in options]
    done = run_specd("generate", PROMPT, *options, "--address", "127.0.0.1:1")
    assert done.returncode == 2
    assert says in complaint(done.stderr)


def test_generate_needs_the_file_of_a_form() -> None:
    done = run_specd("generate", PROMPT, "--schema", "/nonexistent")
    assert done.returncode == 2
    assert "'--schema'" in done.stderr
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr
