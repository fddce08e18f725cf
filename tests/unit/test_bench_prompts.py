"""The prompts of the benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specd.bench.prompts import load_prompts
from specd.errors import StartupError

if TYPE_CHECKING:
    pass


def test_prompts_in_json_lines_are_named_by_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = ['"def f(x):\\n"', '{"prompt": "é \u2028 \\ud83d\\ude00", "id": 7}', "", '  {"id": [], "prompt": " "}  ']
    file.write_bytes("\r\n".join(lines).encode())
    assert load_prompts(file) == {
        "prompts.jsonl:1": "def f(x):\n",
        "prompts.jsonl:2": "é \u2028 😀",
        "prompts.jsonl:4": " ",
    }


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"def f(x):", "not JSON"),
        (b'{"prompt": "def f(x):"', "not JSON"),
        (b'{"text": "def f(x):"}', '{"text": "def f(x):"} is not a prompt'),
        (b'{"prompt": 7}', '{"prompt": 7} is not a prompt'),
        (b'["def f(x):"]', "is not a prompt"),
        (b"null", "null is not a prompt"),
        (b"[" + b"7, " * 1000 + b"7]", "… is not a prompt"),
        (b'{"prompt": ""}', "not empty"),
        (b'""', "not empty"),
        (b'"\xe9"', "not UTF-8"),
        (b'"\\ud83d"', "surrogate"),
    ],
)
def test_a_wrong_prompt_is_refused_with_its_file_and_line(tmp_path: Path, line: bytes, wrong: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'"def f(x):"\n\n' + line + b'\n"class A:"\n')
    with pytest.raises(StartupError) as raised:
        load_prompts(file)
    message = str(raised.value)
    assert message.startswith(f"{file}, line 3: ")
    assert wrong in message
    assert len(message) < len(str(file)) + 160


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(StartupError, match=r"there are no prompts in .*prompts\.jsonl"):
        load_prompts(file)
