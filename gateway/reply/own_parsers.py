"""Parsers of forms of tool calls that mlx-lm cannot parse. They raise any error on a text that is not a call."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gateway.reply.tool_parsers import ToolCall, load_parser

Call = Mapping[str, Any]

_BETWEEN_VALUES = re.compile(r"[\s,;]*")
_MISTRAL_ID = re.compile(r"\[CALL_ID\][\w-]*\[ARGS\]")
_HIDDEN = "\ue0fe"  # a character without a meaning
_GEMMA_KEY = re.compile(r"([{,]\s*)([\w-]+):")
_GEMMA_CALL = re.compile(r"call:([\w.-]{1,128})(?=\{)")
_HUNYUAN_TAG = re.compile(r"<(/?arg_(?:key|value)):opensource>")
_DSML = "｜DSML｜"
_DSML_NAME = re.compile(r'\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>')


def parse_json(text: str, _: Any = None) -> list[Call]:
    """Parse calls in JSON: objects, or lists of them, one after another."""
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    at = 0
    while (between := _BETWEEN_VALUES.match(text, at)) is not None and between.end() < len(text):
        value, at = decoder.raw_decode(text, between.end())
        calls += value if isinstance(value, list) else [value]
    return calls


def _as_calls(calls: Iterable[ToolCall]) -> list[Call]:
    return [{"id": call.call_id, "name": call.name, "arguments": call.arguments} for call in calls]


def parse_mistral(text: str, tools: Any) -> list[Call]:
    """Parse Mistral's calls like mlx-lm, but do not read the id that some models write as the name."""
    mistral = load_parser("mistral")
    if mistral is None:
        raise ValueError("mlx-lm is not installed")
    return _as_calls(mistral.parse(_MISTRAL_ID.sub("[ARGS]", text), tools))


def hiding(name: str, end: str, tag: str) -> Callable[[str, Any], list[Call]]:
    """Return mlx-lm's parser of this name, in which the end marker inside the value of a tag does not end a call."""
    value = re.compile(rf"(<{tag} name=[^>]{{0,200}}>)(.*?)(?=</{tag}>)", re.DOTALL)

    def parse(text: str, tools: Any) -> list[Call]:
        parser = load_parser(name)
        if parser is None:
            raise ValueError("mlx-lm is not installed")
        hidden = value.sub(lambda match: match.group(1) + match.group(2).replace(end, _HIDDEN), text)
        return [
            {**call, "arguments": call["arguments"].replace(_HIDDEN, end)}
            for call in _as_calls(parser.parse(hidden, tools))
        ]

    return parse


def parse_gemma(text: str, _: Any = None) -> list[Call]:
    """Parse Gemma 4's `call:NAME{key:<|"|>text<|"|>,key:3}`.

    mlx-lm's pattern takes cubic time where braces stay open.
    """
    pieces = text.split('<|"|>')
    if len(pieces) % 2 == 0:
        raise ValueError("a string does not end")
    written = "".join(
        json.dumps(piece, ensure_ascii=False) if i % 2 else _GEMMA_KEY.sub(r'\1"\2":', piece)
        for i, piece in enumerate(pieces)
    )
    calls: list[Call] = []
    at = 0
    while (match := _GEMMA_CALL.search(written, at)) is not None:
        arguments, at = json.JSONDecoder().raw_decode(written, match.end())
        calls.append({"name": match.group(1), "arguments": arguments})
    return calls


def parse_functools(text: str, _: Any = None) -> list[Call]:
    """Parse Firefunction's list, whose bracket belongs to the marker."""
    return parse_json(f"[{text}")


def parse_apertus(text: str, _: Any = None) -> list[Call]:
    """Parse Apertus's `[{"NAME": {ARGUMENTS}}]`."""
    return [
        {"name": name, "arguments": arguments} for call in parse_json(text) for name, arguments in dict(call).items()
    ]


def parse_functionary(text: str, _: Any = None) -> Call:
    """Parse Functionary's `NAME>{ARGUMENTS}`."""
    name, _, arguments = text.partition(">")
    return {"name": name.strip(), "arguments": json.loads(arguments)}


def parse_python(text: str, tools: Any) -> list[Call]:
    """Parse Olmo's calls as Python writes them, one on a line."""
    pythonic = load_parser("pythonic")
    if pythonic is None:
        raise ValueError("mlx-lm is not installed")
    calls = [ast.unparse(line) for line in ast.parse(text.strip()).body]
    return _as_calls(pythonic.parse(f"[{', '.join(calls)}]", tools))


def parse_llama(text: str, tools: Any) -> list[Call]:
    """Parse Llama's calls, in JSON or as Python writes them.

    They have no marker, so only calls of offered functions count.
    """
    text = text.strip()
    names = {tool["function"]["name"] for tool in tools}
    try:
        calls = parse_json(text)
    except ValueError:
        pythonic = load_parser("pythonic")
        if pythonic is None:
            raise
        found = pythonic.parse(text if text.startswith("[") else f"[{text}]", tools)
        calls = [{**call, "name": call["name"].removesuffix(".call")} for call in _as_calls(found)]
    for call in calls:
        name = call.get("name", call.get("function"))
        if name not in names:
            raise ValueError(f"{name!r} is not an offered function")
    return calls


def parse_deepseek(text: str, _: Any = None) -> list[Call]:
    """Parse the calls of DeepSeek V3.1, and those of V3 and R1, which have a type and a code block."""
    calls: list[Call] = []
    for piece in text.split("<｜tool▁call▁begin｜>")[1:]:
        said = piece.rpartition("<｜tool▁call▁end｜>")[0] or piece
        name, separator, arguments = said.partition("<｜tool▁sep｜>")
        if not separator:
            raise ValueError("a call without a separator")
        if "```json" in arguments and name.strip() == "function":
            name, _, block = arguments.partition("```json")
            arguments = block.rpartition("```")[0]
        calls.append({"name": name.strip(), "arguments": json.loads(arguments)})
    return calls


def parse_dsml(text: str, _: Any = None) -> list[Call]:
    """Parse the calls of DeepSeek V3.2 and V4."""
    calls: list[Call] = []
    for invoke in text.split(f"<{_DSML}invoke")[1:]:
        name, _, rest = _dsml_name(invoke)
        body, end, _ = rest.rpartition(f"</{_DSML}invoke>")
        if not end:
            raise ValueError(f"the call of {name!r} does not end")
        arguments = {}
        for parameter in body.split(f"<{_DSML}parameter")[1:]:
            key, is_string, rest = _dsml_name(parameter)
            value, end, _ = rest.partition(f"</{_DSML}parameter>")
            if not end:
                raise ValueError(f"the parameter {key!r} does not end")
            arguments[key] = value if is_string else json.loads(value)
        calls.append({"name": name, "arguments": arguments})
    return calls


def _dsml_name(text: str) -> tuple[str, bool, str]:
    match = _DSML_NAME.match(text)
    if match is None:
        raise ValueError("a tag without a name")
    return match.group(1), match.group(2) == "true", text[match.end() :]


def parse_hunyuan(text: str, tools: Any) -> list[Call]:
    """Parse Hunyuan's calls, which are GLM's with other names of tags."""
    glm = load_parser("glm47")
    if glm is None:
        raise ValueError("mlx-lm is not installed")
    calls: list[Call] = []
    for piece in text.split("<tool_call:opensource>")[1:]:
        said = piece.rpartition("</tool_call:opensource>")[0]
        name, separator, arguments = said.partition("<tool_sep:opensource>")
        if not separator:
            raise ValueError("a call without a separator")
        pairs = _HUNYUAN_TAG.sub(r"<\1>", arguments).strip()
        calls += _as_calls(glm.parse(f"{name.strip()}{pairs}", tools))
    return calls


def parse_solar(text: str, _: Any = None) -> list[Call]:
    """Parse Solar's `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>`."""
    calls: list[Call] = []
    for piece in text.split("<|tool_call:begin|>")[1:]:
        call_id, _, rest = piece.rpartition("<|tool_call:end|>")[0].partition("<|tool_call:name|>")
        name, _, arguments = rest.partition("<|tool_call:args|>")
        calls.append({"id": call_id.strip(), "name": name.strip(), "arguments": json.loads(arguments)})
    return calls
