"""The tools of a request that may be called, and whether one must be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.http.errors import invalid

_FIELD = "tool_choice"
_KNOWN = "send 'auto', 'none', 'required', or the name of a function"


@dataclass(frozen=True)
class ToolChoice:
    """Tools that may be called, in the form of chat completions; `must_call` if the reply has to call one of them.

    Without `has_parallel_calls`, a reply has one call. It `is_limited` if the model is told of other tools as well.
    `numbers` are those of the tools in the request, the first is 0. There, `prefix` is the place of a function's fields
    within its tool, and `parameters_field` the name of its parameters.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    has_parallel_calls: bool = True
    is_limited: bool = False
    prefix: str = "function."
    parameters_field: str = "parameters"
    numbers: Sequence[int] = ()

    @property
    def must_be_kept(self) -> bool:
        """Whether the reply is to be refused rather than that it calls other tools, or none."""
        return self.must_call or self.is_limited

    @property
    def strict_places(self) -> list[int]:
        """The numbers of the tools with parameters that calls must keep."""
        return [self._number(i) for i, tool in enumerate(self.tools) if tool["function"].get("strict")]

    def name_place(self, index: int) -> str:
        """Return where the request has the name of one of the tools."""
        return f"tools[{self._number(index)}].{self.prefix}name"

    def parameters_place(self, index: int) -> str:
        """Return where the request has the parameters of one of the tools."""
        return f"tools[{self._number(index)}].{self.prefix}{self.parameters_field}"

    def _number(self, index: int) -> int:
        return self.numbers[index] if self.numbers else index

    @classmethod
    def of(
        cls,
        asked: str | Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
        *,
        has_parallel_calls: bool,
        prefix: str = "function.",
        parameters_field: str = "parameters",
        numbers: Sequence[int] = (),
    ) -> ToolChoice:
        """Return what a request asks for. Raises ApiError for a choice that is not known or without its tools."""
        every = cls(
            tools,
            has_parallel_calls=has_parallel_calls,
            prefix=prefix,
            parameters_field=parameters_field,
            numbers=numbers,
        )
        if isinstance(asked, str):
            return every._of_mode(asked, _FIELD)
        if asked is None:
            return every
        match asked.get("type"):
            case "function":
                only = every._among([asked], _FIELD)
                return replace(only, must_call=True, has_parallel_calls=False)
            case "allowed_tools":
                # Chat completions have the fields one level deeper than responses.
                allowed = asked.get("allowed_tools", asked)
                place = f"{_FIELD}.allowed_tools"
                names = allowed.get("tools") if isinstance(allowed, Mapping) else None
                if not isinstance(names, list):
                    raise invalid(f"{place}.tools is missing: send a list of functions", place)
                return every._among(names, f"{place}.tools")._of_mode(allowed.get("mode", "auto"), f"{place}.mode")
        raise invalid(f"{_FIELD}.type is {str(asked.get('type'))[:100]!r}: {_KNOWN}", _FIELD)

    def _of_mode(self, mode: object, place: str) -> ToolChoice:
        if mode == "none":
            return replace(self, tools=())
        if mode not in {"auto", "required"}:
            raise invalid(f"{place} is {str(mode)[:100]!r}: {_KNOWN}", place)
        if mode == "required" and not self.tools:
            raise invalid(f"{place} is 'required', but the request has no tools: send tools", place)
        return replace(self, must_call=mode == "required")

    def _among(self, wanted: Sequence[object], place: str) -> ToolChoice:
        """Return the choice among the tools of these names."""
        names = [_name_of(each, place) for each in wanted]
        offered = {tool["function"]["name"] for tool in self.tools}
        _check_offered(names, offered, place)
        chosen = [i for i, tool in enumerate(self.tools) if tool["function"]["name"] in names]
        return replace(
            self,
            tools=[self.tools[i] for i in chosen],
            numbers=[self._number(i) for i in chosen],
            is_limited=len(chosen) < len(self.tools),
        )


NO_TOOLS = ToolChoice()


def without_strict(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as templates read them: `strict` is for the grammar of their calls."""
    return [
        {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
        for tool in tools
    ]


def _name_of(asked: object, place: str) -> str:
    function = asked.get("function", asked) if isinstance(asked, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid(f"{place} has no name of a function: {_KNOWN}", place, "missing_required_parameter")
    return name


def _check_offered(names: Sequence[str], offered: Collection[str], place: str) -> None:
    for name in names:
        if name not in offered:
            raise invalid(f"{place}: {name[:100]!r} is not one of the tools", place)
