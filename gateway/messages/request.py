"""The requests of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.calls.tool_choice import ToolChoice, without_strict
from gateway.chat.messages import MAX_MESSAGES, Contents, checked_chat
from gateway.chat.request import MAX_TOOLS
from gateway.fields import Array, Count, Defaults, JsonObject, StopString, StrictModel, refuse_field
from gateway.generation import RequestedGeneration
from gateway.grammars import GrammarFields, TextFormat
from gateway.http.errors import invalid
from gateway.messages.conversation import InputMessage, check_prefill, template_messages
from gateway.reasoning_effort import Effort
from specd.sampling import MAX_STOP_STRINGS


class MessageTool(StrictModel):
    """A tool. A custom one is called by the model; the other types are Anthropic's own, and are ignored."""

    type: str | None = None  # custom
    name: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = Field(None, description="Calls keep the input_schema.")

    @property
    def is_custom(self) -> bool:
        """Whether the client runs it."""
        return (self.type or "custom") == "custom"

    def as_function(self, place: str) -> dict[str, Any]:
        """Return the tool as chat completions have it. Raises ApiError without a name."""
        if not self.name:
            raise invalid(f"{place}.name is missing", f"{place}.name", "missing_required_parameter")
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.input_schema is not None:
            function["parameters"] = self.input_schema
        return {"type": "function", "function": {**function, "strict": True} if self.strict else function}


class MessageToolChoice(StrictModel):
    """The tools that may be called, and whether one must be."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="true: a reply has one call.")


class Thinking(StrictModel):
    """Whether the model is to reason before its answer."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputConfig(StrictModel):
    """The effort of the reasoning, and the form of the answer."""

    effort: Effort | None = None
    format: TextFormat | None = None


class CountFields(GrammarFields):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[Array[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Contents | None = None
    tools: Annotated[Array[MessageTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    stop_sequences: Annotated[Array[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    thinking: Thinking | None = Field(None, description="For models with a chat template that reads enable_thinking.")
    output_config: OutputConfig | None = None
    output_format: TextFormat | None = Field(None, description="The older name of output_config.format.")
    cache_control: JsonObject | None = Field(None, description="No effect: prefixes are always cached.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables for the model's chat template.")

    @cached_property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, as templates read them."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return without_strict(self._functions.values())

    @cached_property
    def chosen_tools(self) -> ToolChoice:
        """The tools that may be called. Raises ApiError for a choice that is not among them."""
        choice = self.tool_choice or MessageToolChoice(type="auto", disable_parallel_tool_use=None)
        asked: str | dict[str, str] = choice.type
        if choice.type == "tool":
            if choice.name is None:
                raise invalid("tool_choice.name is missing", "tool_choice.name", "missing_required_parameter")
            asked = {"type": "function", "name": choice.name}
        elif choice.type == "any":
            if not self._functions:
                raise invalid("tool_choice is 'any', but the request has no tools: send tools", "tool_choice")
            asked = "required"
        return ToolChoice.of(
            asked,
            list(self._functions.values()),
            has_parallel_calls=not choice.disable_parallel_tool_use,
            prefix="",
            parameters_field="input_schema",
            numbers=list(self._functions),
        )

    @cached_property
    def _functions(self) -> dict[int, dict[str, Any]]:
        """The custom tools by their number in the request."""
        return {i: tool.as_function(f"tools[{i}]") for i, tool in enumerate(self.tools or []) if tool.is_custom}

    @property
    def effort(self) -> Effort | None:
        """The effort of the reasoning, if the request has one."""
        return self.output_config.effort if self.output_config is not None else None

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason, if the request decides that."""
        return self.thinking.type != "disabled" if self.thinking is not None else None

    def ignored(self) -> list[str]:
        """Return the names of the fields that do nothing here, Anthropic's own tools among them."""
        others = [f"tools[{i}]" for i, tool in enumerate(self.tools or []) if not tool.is_custom]
        others += ["token_sources"] if self.token_sources else []
        for name, part in (("thinking", self.thinking), ("output_config", self.output_config)):
            extra = part.model_extra or {} if part is not None else {}
            others += [f"{name}.{field}" for field, value in extra.items() if value is not None]
        return sorted([*super().ignored(), *others])

    def message_generation(self, seed: int, defaults: Defaults, max_tokens: int = 1) -> RequestedGeneration:
        """Return the generation that the fields ask for. Raises ApiError for a field that cannot be kept.

        More tokens than the context has room for are cut to it, unless the request forbids that.
        """
        if self.stop is not None:
            raise refuse_field("stop", "its name is stop_sequences here")
        if (self.n or 1) > 1:
            raise refuse_field("n", "a message is one: ask several times")
        place, form = "output_config.format", self.output_config.format if self.output_config is not None else None
        if self.output_format is not None:
            if form is not None:
                raise refuse_field("output_format", "it is the older name of output_config.format: leave one out")
            place, form = "output_format", self.output_format
        chat = checked_chat(
            template_messages(self.system, self.messages),
            self.offered_tools,
            self.chat_template_kwargs or {},
            continue_final_message=check_prefill(self.messages),
        )
        return self.generation(
            chat,
            seed,
            max_tokens,
            defaults,
            tools=self.chosen_tools,
            stop=self.stop_sequences,
            cut_max_tokens=self.cut_max_tokens is not False,
            **self.grammar_options(place, form),
        )


class MessageFields(CountFields):
    """POST /v1/messages."""

    max_tokens: Annotated[Count, Field(ge=1)]
