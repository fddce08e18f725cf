"""Parsers of tool calls: mlx-lm's, without MLX, and the calls that they find, checked."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from gateway.calls.parameters import Parameters
from gateway.reply.cutter import Quotes

_PACKAGE = "gateway._mlx_lm_tool_parsers"
_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[\w.:/-]+")
# Further fields of a call without arguments.
_OTHER_KEYS = {"id", "type", "tool_call_id", "index"}

JSON_STRINGS: Quotes = {'"': ('"', "\\\\", '\\"')}
PYTHON_STRINGS: Quotes = {**JSON_STRINGS, "'": ("'", "\\\\", "\\'")}
# The quotes within which an end marker is text, by mlx-lm's parsers.
_STRINGS: Mapping[str, Quotes] = {
    "function_gemma": {"<escape>": ("<escape>",)},
    "glm47": {"<arg_value>": ("</arg_value>",)},
    "json_tools": JSON_STRINGS,
    "kimi_k2": JSON_STRINGS,
    "kimi_k3": {"<|open|>argument": ("<|close|>argument",), "<|open|>json": ("<|close|>json",)},
    "longcat": {"<longcat_arg_value>": ("</longcat_arg_value>",)},
    "muse_spark": {"<atem:parameter": ("</atem:parameter>",)},
    "pythonic": PYTHON_STRINGS,
    "qwen3_coder": {"<parameter=": ("</parameter>",)},
}

# The beginnings and ends of mlx-lm's patterns, by parser: each beginning without an end is searched to the end of the
# text, which takes quadratic time.
_PAIRS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "function_gemma": (("call:", "}"),),
    "glm47": (("<arg_key>", "</arg_value>"),),
    "kimi_k2": (("<|tool_call_begin|>", "<|tool_call_end|>"),),
    "kimi_k3": (("<|open|>call", "<|close|>call<|sep|>"), ("<|open|>argument", "<|close|>argument<|sep|>")),
    "longcat": (("<longcat_arg_key>", "</longcat_arg_value>"),),
    "minimax_m2": (("<invoke name=", "</invoke>"), ("<parameter name=", "</parameter>")),
    "muse_spark": (("<atem:invoke", "</atem:invoke>"), ("<atem:parameter", "</atem:parameter>")),
    "pythonic": (("(", ")]"),),
    "qwen3_coder": (("<function=", "</function>"), ("<parameter=", "</parameter>")),
}
# Parsers of values without quotes.
_GUESSING = {"glm47", "longcat", "minicpm5", "minimax_m2", "qwen3_coder"}
_LONG = 4096  # characters; a text of this length or more must have the ends


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, with its arguments as JSON, as OpenAI has them."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolParser:
    """A form of tool calls: between `start` and `end`, which is "" if they extend to the end.

    A reply that begins with one of `bare` can be a call as well, without any marker. Within `quotes`, `end` is text.
    A parser that `guesses` the types of values gets them corrected by the schema.
    """

    start: str
    end: str
    _parse: Callable[[str, Any], Any]
    quotes: Quotes = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    guesses: bool = False

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """Return the calls in the text between the markers. Raises ValueError if it is not a call."""
        if len(text) > _LONG and any(text.rfind(begin) > text.rfind(end) for begin, end in self.pairs):
            raise ValueError("a part of the call does not end")
        try:
            parsed = self._parse(text, list(tools))
            calls = parsed if isinstance(parsed, list) else [parsed]
            if not calls:
                raise ValueError("no call")
            schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
            found = [tool_call(call, schemas) for call in calls]
            return [fitted(call, schemas.get(call.name)) for call in found] if self.guesses else found
        except Exception as error:  # the parsers can raise any error on a text that is not a call
            raise ValueError(f"not a tool call: {error}") from error


def tool_call(call: Mapping[str, Any], names: Collection[str] = ()) -> ToolCall:
    """Return a call that a parser found.

    Raises ValueError unless its name is one of the names, or can be one, and its arguments are an object.
    """
    name = next((call[key] for key in _NAMES if key in call), None)
    if isinstance(name, Mapping):  # OpenAI's form
        return tool_call(name, names)
    if not isinstance(name, str) or (name not in names and not _NAME.fullmatch(name)):
        raise ValueError(f"{name!r} is not the name of a function")
    key = next((key for key in _ARGUMENTS if key in call), "")
    if not key and (others := call.keys() - {*_NAMES, *_OTHER_KEYS}):
        raise ValueError(f"a tool call with {sorted(others)} instead of arguments")
    arguments = call.get(key)
    written = arguments if isinstance(arguments, str) else _json({} if arguments is None else arguments)
    if not isinstance(json.loads(written or "{}", parse_constant=_refuse), dict):
        raise ValueError("the arguments of a tool call are not an object")  # noqa: TRY004 - callers catch ValueError
    call_id = call.get("id")
    written_id = call_id if isinstance(call_id, str) and call_id else f"call_{uuid.uuid4().hex[:24]}"
    return ToolCall(written_id, name, written or "{}")


def fitted(call: ToolCall, schema: Mapping[str, Any] | None) -> ToolCall:
    """Return a call with arguments of the types in their schema, as far as their text allows."""
    try:
        arguments = Parameters(schema).fitted(json.loads(call.arguments))
    except (AttributeError, RecursionError, TypeError, ValueError):
        return call  # not a schema
    return replace(call, arguments=_json(arguments))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parse_glm(text: str, tools: Any) -> Any:
    """Parse like mlx-lm, which returns unreadable calls with an argument `raw`, but refuse these."""
    call = importlib.import_module(f"{_PACKAGE}.glm47").parse_tool_call(text, tools)
    if call["arguments"].keys() == {"raw"} and "<arg_key>raw" not in text and '"raw"' not in text:
        raise ValueError("no arguments in the form of GLM")
    return call


@cache
def load_parser(name: str, *, start: str = "", end: str = "") -> ToolParser | None:
    """Return one of mlx-lm's parsers; None if mlx-lm is not installed, or has no such parser.

    `start` and `end` are markers that replace the parser's own. `import mlx_lm` would load MLX. The parsers do not need
    MLX, so their folder is loaded as a package of its own.
    """
    mlx_lm = PathFinder.find_spec("mlx_lm")
    for location in (mlx_lm.submodule_search_locations or ()) if mlx_lm is not None else ():
        folder = Path(location) / "tool_parsers"
        if not (folder / f"{name}.py").is_file():
            continue
        if _PACKAGE not in sys.modules:
            spec = ModuleSpec(_PACKAGE, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        module = importlib.import_module(f"{_PACKAGE}.{name}")
        parse = _parse_glm if name == "glm47" else module.parse_tool_call
        return ToolParser(
            start or module.tool_call_start,
            end or module.tool_call_end,
            parse,
            _STRINGS.get(name, {}),
            pairs=_PAIRS.get(name, ()),
            guesses=name in _GUESSING,
        )
    return None
