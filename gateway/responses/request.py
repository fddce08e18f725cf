"""The request of /v1/responses, and the conversation that its items are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from gateway.calls.tool_choice import ToolChoice, without_strict
from gateway.chat.messages import (
    MAX_MESSAGES,
    CalledFunction,
    CallMessage,
    Contents,
    Message,
    checked_chat,
    template_messages,
    text_of,
)
from gateway.chat.request import MAX_TOOLS
from gateway.fields import Array, Count, Defaults, JsonObject, StrictModel, refuse_field
from gateway.generation import RequestedGeneration
from gateway.grammars import GrammarFields, TextFormat
from gateway.http.errors import invalid
from gateway.reasoning_effort import Effort


class Reasoning(StrictModel):
    """How much the model is to reason."""

    effort: Effort | None = None


class TextOptions(StrictModel):
    """How the text is to be."""

    format: TextFormat | None = None


class Item(StrictModel):
    """An item of the input: a message, a call of a tool, its result, or reasoning, which is not read again."""

    type: str | None = None  # a message
    role: str | None = None
    content: Contents | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Contents | None = None


class ResponseTool(StrictModel):
    """A tool; of those that OpenAI runs itself, there are none here."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @property
    def as_function(self) -> dict[str, Any]:
        """The tool as chat completions have it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class ResponseFields(GrammarFields):
    """POST /v1/responses."""

    input: str | Annotated[Array[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    tools: Annotated[Array[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: a reply has one call.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = Field(None, description="`effort`, of models whose chat template reads it.")
    previous_response_id: str | None = Field(None, description="Refused: the gateway keeps no responses.")
    background: bool | None = Field(None, description="Refused if true: the gateway keeps no responses.")
    chat_template_kwargs: JsonObject | None = None

    @cached_property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The functions that the model is told of, as templates read them."""
        if self.tool_choice == "none":
            return []
        return without_strict(tool.as_function for tool in self._functions.values())

    @cached_property
    def chosen_tools(self) -> ToolChoice:
        """The tools that may be called. Raises ApiError for a choice that is not known, or not among them."""
        return ToolChoice.of(
            self.tool_choice,
            [tool.as_function for tool in self._functions.values()],
            has_parallel_calls=self.parallel_tool_calls is not False,
            prefix="",
            numbers=list(self._functions),
        )

    @property
    def _functions(self) -> dict[int, ResponseTool]:
        return {i: tool for i, tool in enumerate(self.tools or []) if tool.type == "function" and tool.name}

    def ignored(self) -> list[str]:
        """Return the names of the fields that do nothing here, tools that are no functions among them."""
        others = [f"tools[{i}]" for i, tool in enumerate(self.tools or []) if tool.type != "function"]
        reasoning = self.reasoning.model_extra or {} if self.reasoning is not None else {}
        others += [f"reasoning.{name}" for name, value in reasoning.items() if value is not None]
        return sorted([*super().ignored(), *others])

    def _changing(self) -> Mapping[str, tuple[Any, ...]]:
        return {**super()._changing(), "conversation": (), "prompt": ()}  # which OpenAI keeps

    @property
    def reasoning_effort(self) -> Effort | None:
        """The effort, as chat completions name it."""
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def text_format(self) -> TextFormat | None:
        """The form of the text, if the request has one."""
        return self.text.format if self.text is not None else None

    def response_generation(self, seed: int, defaults: Defaults) -> RequestedGeneration:
        """Return the generation that the fields ask for. Raises ApiError for what cannot be kept."""
        if self.previous_response_id:
            raise refuse_field(
                "previous_response_id", "responses are not kept here: send the whole input, or session_id"
            )
        if self.background:
            raise refuse_field("background", "responses are not kept here: stay connected until it is whole")
        if (self.n or 1) > 1:
            raise refuse_field("n", "a response is one: ask several times")
        chat = checked_chat(self._messages(), self.offered_tools, self.chat_template_kwargs or {})
        return self.generation(
            chat,
            seed,
            self.max_output_tokens,
            defaults,
            max_tokens_field="max_output_tokens",
            tools=self.chosen_tools,
            **self.grammar_options("text.format", self.text_format),
        )

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            messages = [Message(role="user", content=self.input)]
        else:
            messages = [message for i, item in enumerate(self.input) for message in _message(item, f"input[{i}]")]
        written: list[dict[str, Any]] = []
        first = {"role": "system", "content": self.instructions} if self.instructions else None
        for message in [*([first] if first else []), *template_messages(messages)]:
            last: dict[str, Any] = written[-1] if written else {"role": ""}
            # Templates want one system message, and calls that were made at once in one message.
            if message["role"] == last["role"] == "system":
                last["content"] += f"\n\n{message['content']}"
            elif "tool_calls" in message and last["role"] == "assistant":
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            else:
                written.append(dict(message))
        return written


def _message(item: Item, place: str) -> list[Message]:
    match item.type or "message":
        case "message":
            if not item.role:
                raise invalid(f"{place}.role is missing", f"{place}.role", "missing_required_parameter")
            return [Message(role=item.role, content=text_of(item.content, f"{place}.content"))]
        case "function_call":
            function = CalledFunction(name=_given(item.name, f"{place}.name"), arguments=item.arguments or "{}")
            return [Message(role="assistant", tool_calls=[CallMessage(id=item.call_id or "", function=function)])]
        case "function_call_output":
            call_id = _given(item.call_id, f"{place}.call_id")
            return [Message(role="tool", tool_call_id=call_id, content=text_of(item.output, f"{place}.output"))]
        case "reasoning":
            return []
    raise invalid(f"{place} is of type {(item.type or '')[:100]!r}, which is not known here", f"{place}.type")


def _given(value: str | None, place: str) -> str:
    if value is None:
        raise invalid(f"{place} is missing", place, "missing_required_parameter")
    return value


def shown_fields(fields: ResponseFields) -> Mapping[str, Any]:
    """Return the fields that a response repeats of its request, and what OpenAI's has besides: clients check them."""
    return {
        "background": False,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
        "reasoning": {"effort": fields.reasoning_effort, "summary": None} if fields.reasoning_effort else None,
        "text": {"format": _shown_format(fields.text_format)},
        "top_logprobs": 0,
        "max_tool_calls": None,
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "presence_penalty": fields.presence_penalty or 0.0,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "tool_choice": fields.tool_choice or "auto",
        "tools": [
            {**tool.model_dump(), "strict": bool(tool.strict)} for tool in fields.tools or [] if tool.type == "function"
        ],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "metadata": {},
    }


def _shown_format(form: TextFormat | None) -> Mapping[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": form.type if form is not None else "text"}
    shown = form.model_dump(include={"name", "description", "schema_", "strict"}, by_alias=True)
    return {"type": form.type, **shown}
