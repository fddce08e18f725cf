"""mlx-lm's parsers of tool calls, without MLX."""

from __future__ import annotations

import importlib.util
import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_PACKAGE = "gateway._mlx_lm_tool_parsers"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, with its arguments as JSON, as OpenAI has them."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolParser:
    """How a model writes calls of tools: between `start` and `end`, which is empty if they go on to the end."""

    start: str
    end: str
    _parse: Callable[[str, Any], Any]

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """Return the calls in what stands between the markers. Raises ValueError if it is none."""
        try:
            parsed = self._parse(text, list(tools))
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [_tool_call(call) for call in calls]
        except Exception as error:  # the parsers raise what their steps raise: of the text is known only what it means
            raise ValueError(f"not a tool call: {error}") from error


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call_id = call.get("id")
    return ToolCall(call_id if isinstance(call_id, str) and call_id else f"call_{uuid.uuid4().hex[:24]}", name, written)


@cache
def load_parser(name: str) -> ToolParser | None:
    """Return one of mlx-lm's parsers; None if mlx-lm is not installed, or has no such parser.

    `import mlx_lm` would load MLX. The parsers need none of it, so their folder is loaded as a package of its own.
    """
    mlx_lm = importlib.util.find_spec("mlx_lm")
    for location in (mlx_lm.submodule_search_locations or ()) if mlx_lm is not None else ():
        folder = Path(location) / "tool_parsers"
        if not (folder / f"{name}.py").is_file():
            continue
        if _PACKAGE not in sys.modules:
            spec = ModuleSpec(_PACKAGE, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        module = importlib.import_module(f"{_PACKAGE}.{name}")
        return ToolParser(module.tool_call_start, module.tool_call_end, module.parse_tool_call)
    return None
