"""The request of a chat completion."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from gateway.calls.tool_choice import ToolChoice
from gateway.chat.messages import MAX_MESSAGES, Contents, Message, checked_chat, template_messages, text_of
from gateway.fields import Array, Count, Defaults, JsonObject, StrictModel, refuse_field
from gateway.generation import RequestedGeneration
from gateway.grammars import GrammarFields, ResponseFormat
from gateway.reasoning_effort import Effort
from specd.sampling import MAX_TOP_LOG_PROBABILITIES

MAX_TOOLS = 128


class Function(StrictModel):
    """A function that the model may call, with the JSON schema of its parameters."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="Calls keep the schema of the parameters.")


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function
    _written: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        tool = validate(values)
        tool._written = values
        return tool

    @property
    def as_written(self) -> dict[str, Any]:
        """The tool with its keys in the client's order: caches and models know it so. null is the same as none."""
        tool = {name: value for name, value in self._written.items() if value is not None}
        function = {name: value for name, value in tool["function"].items() if value is not None}
        return {**tool, "function": function}


class Prediction(StrictModel):
    """What the client expects to come, such as a file that is to be edited: it is proposed where it fits."""

    type: Literal["content"]
    content: Contents


class ChatFields(GrammarFields):
    """POST /v1/chat/completions."""

    messages: Annotated[Array[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = Field(
        None, description="The newer name of max_tokens."
    )
    logprobs: bool | Literal[0] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBABILITIES)] | None = None
    tools: Annotated[Array[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | JsonObject | None = Field(
        None, description="'auto', 'none', 'required', a function, or allowed tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: a reply has one call.")
    response_format: ResponseFormat | None = Field(None, description="Enforced, also without `strict`.")
    reasoning_effort: Effort | None = Field(None, description="Of models whose chat template reads it.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables for the model's chat template.")
    continue_final_message: bool | None = Field(None, description="Continue the last message.")
    prediction: Prediction | None = None

    def _changing(self) -> Mapping[str, tuple[Any, ...]]:
        # vLLM's way to continue the last message sets both.
        prompted = {"add_generation_prompt": (True, False)} if self.continue_final_message else {}
        return {**super()._changing(), **prompted, "add_special_tokens": (False,), "echo": (False,)}

    @cached_property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        if self.tool_choice == "none":
            return []
        return [tool.as_written for tool in self.tools or []]

    @cached_property
    def chosen_tools(self) -> ToolChoice:
        """The tools that may be called. Raises ApiError for a choice that is not known, or not among them."""
        return ToolChoice.of(
            self.tool_choice, self.offered_tools, has_parallel_calls=self.parallel_tool_calls is not False
        )

    def chat_generation(self, seed: int, defaults: Defaults) -> RequestedGeneration:
        """Return the generation that the fields ask for. Raises ApiError for what cannot be kept."""
        if self.top_logprobs and not self.logprobs:
            raise refuse_field("top_logprobs", "set logprobs to true with it")
        max_tokens = self.max_completion_tokens or self.max_tokens
        name = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
        chat = checked_chat(
            template_messages(self.messages),
            self.offered_tools,
            self.chat_template_kwargs or {},
            continue_final_message=bool(self.continue_final_message),
        )
        expected = text_of(self.prediction.content, "prediction.content") if self.prediction is not None else ""
        return self.generation(
            chat,
            seed,
            max_tokens,
            defaults,
            max_tokens_field=name,
            top_log_probabilities=(self.top_logprobs or 0) if self.logprobs else None,
            prediction=expected or None,
            tools=self.chosen_tools,
            **self.grammar_options("response_format", self.response_format),
        )
