"""Prompts of a benchmark: specd's own or the user's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from specd.errors import StartupError
from specd.text.tokenizer import Tokenizer

Value = TypeVar("Value")

_SHORT_TOKENS = 512


def load_prompts(source: Path | None = None, *, for_encoder: bool = False) -> dict[str, str]:
    """Return prompts by name; without a source, specd's own, for a decoder or for the embedded T5.

    A source is a directory with a file for each prompt, or a file in JSON Lines: on each line a string, or an object
    whose `prompt` is one; its other fields are ignored. Raises StartupError if there is no prompt or a line is invalid.
    """
    kind = "sources" if for_encoder else "prompts"
    packaged = Path(__file__).parent / kind
    here = packaged if packaged.is_dir() else Path(__file__).parents[2] / "benchmarks" / kind
    if source is not None and not source.is_dir():
        return _read_lines(source)
    files = sorted(path for path in (source or here).iterdir() if path.is_file())
    if not files:
        raise StartupError(f"there are no prompts in {source or here}: put each prompt into a file of its own")
    return {path.name: path.read_text() for path in files}


def spread(prompts: Mapping[str, Value], count: int) -> dict[str, Value]:
    """Return `count` of the prompts, evenly spread."""
    names = list(prompts)
    count = min(count, len(names))
    return {name: prompts[name] for name in (names[i * len(names) // count] for i in range(count))}


def encode(prompts: Mapping[str, str], tokenizer_json: bytes) -> dict[str, list[int]]:
    """Return the token ids of the prompts, as the coordinator encodes them."""
    tokenizer = Tokenizer(tokenizer_json)
    return {name: tokenizer.encode(prompt) for name, prompt in prompts.items()}


def short(prompts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return the prompts whose prefill takes no longer than decoding their completions."""
    return {name: ids for name, ids in prompts.items() if len(ids) <= _SHORT_TOKENS}


def _read_lines(path: Path) -> dict[str, str]:
    """Return the prompts of a JSON Lines file, named by line number, without blank lines."""
    prompts = {}
    # Not splitlines(), which splits at characters that a JSON string may contain.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                prompts[f"{path.name}:{number}"] = _read_prompt(line)
            except ValueError as error:
                raise StartupError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise StartupError(
            f'there are no prompts in {path}: write one on each line, as a JSON string or {{"prompt": "…"}}'
        )
    return prompts


def _read_prompt(line: bytes) -> str:
    """Return the prompt on a line. Raises ValueError with the reason if it is wrong."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"this is not UTF-8 text: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at column {error.colno}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not prompt or not isinstance(prompt, str):
        text = line.decode().strip()
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise ValueError(f'{shown} is not a prompt: write a JSON string or {{"prompt": "…"}} that is not empty')
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError("the prompt has half of a surrogate pair, which is not a character: remove it")
    return prompt
