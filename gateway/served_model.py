"""A model that is served, as the gateway describes it, and the form of its replies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gateway.calls.grammar import can_be_kept, grammar_of
from gateway.calls.tool_choice import ToolChoice
from gateway.fields import refuse_field
from gateway.generation import RequestedGeneration
from gateway.reasoning_effort import Effort, with_effort, with_thinking
from gateway.reply.format import ReplyFormat, detect_format, with_calls
from gateway.reply.reader import ReplyReader
from specd.client import GenerationOptions, ServiceDescription
from specd.model_info import ModelInfo
from specd.text.chat import Chat
from specd.version import __version__
from specd.vocabulary import TokenSource


@dataclass(frozen=True)
class ModelCard:
    """A model that the coordinator serves, as its clients name it, and what decides the tokens of a seed.

    `parent` is the name of the model that an adapter adapts, "" for the target itself.
    """

    model_id: str
    context_length: int
    vocabulary_size: int
    system_fingerprint: str
    chat_template: str
    special_tokens: Mapping[int, str]
    details: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""

    @classmethod
    def all_of(cls, service: ServiceDescription) -> list[ModelCard]:
        """Return the cards of the models that a coordinator describes: the target, then its adapters."""
        target = service.target
        return [cls.of(service, model) for model in (target, *map(target.with_adapter, target.adapters))]

    @classmethod
    def of(cls, service: ServiceDescription, target: ModelInfo) -> ModelCard:
        """Return the card of a target, or of one with an adapter."""
        return cls(
            model_id=target.name,
            context_length=target.context_length,
            vocabulary_size=target.vocabulary_size,
            system_fingerprint=fingerprint_of(target),
            chat_template=service.chat_template,
            special_tokens=service.special_tokens,
            details={
                **_known_of(target),
                "draft": service.draft.name if service.draft is not None else None,
                "sources": {each.value: each.label for each in TokenSource if each.value in service.sources},
                "chat": bool(service.chat_template),
            },
            parent=target.parent,
        )

    @classmethod
    def listed(cls, model: ModelInfo) -> ModelCard:
        """Return what is known of a model that was not described: its name alone if it was never loaded."""
        return cls(
            model_id=model.name,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            system_fingerprint="",
            chat_template="",
            special_tokens={},
            details=_known_of(model) if model.architecture else {},
            parent=model.parent,
        )


def _known_of(model: ModelInfo) -> dict[str, Any]:
    return {"architecture": model.architecture, "precision": model.precision}


def fingerprint_of(model: ModelInfo) -> str:
    """Return OpenAI's `system_fingerprint` of a model."""
    # What decides which token follows: the weights, and the device and the library that compute with them.
    deciding = (model.fingerprint, model.vocabulary_fingerprint, model.precision, model.device, __version__)
    digest = hashlib.sha256("\n".join(deciding).encode()).hexdigest()
    return f"specd_{digest[:16]}"


@dataclass(frozen=True)
class Asked:
    """A generation as a model can give it; `free_calls` are the numbers of strict tools that are not held."""

    generation: RequestedGeneration
    reads_effort: bool = True
    reads_thinking: bool = True
    free_calls: Sequence[int] = ()


@dataclass(frozen=True)
class KnownModel:
    """A model, and the form of its replies."""

    model: ModelCard

    def asked(self, generation: RequestedGeneration, effort: Effort | None, *, thinks: bool | None = None) -> Asked:
        """Return the generation of a reply in this model's form. Raises ApiError for a form that it cannot keep.

        `thinks` is whether it is to reason, where the request says. Its stop strings look at the answer, not at the
        reasoning.
        """
        prompt = generation.prompt
        if self.reply_format.channels is not None and isinstance(prompt, Chat):
            prompt = replace(prompt, messages=tuple(map(self.reply_format.channels.message, prompt.messages)))
        options: GenerationOptions = {**generation.options, "reasoning": self.reply_format.before_answer}
        generation = replace(generation, prompt=prompt, options=options)
        generation, reads_thinking = with_thinking(generation, thinks, self.model.chat_template)
        generation, reads_effort = with_effort(generation, effort, self.model.chat_template)
        generation, free = self._in_form(generation)
        return Asked(generation, reads_effort=reads_effort, reads_thinking=reads_thinking, free_calls=free)

    def _in_form(self, generation: RequestedGeneration) -> tuple[RequestedGeneration, Sequence[int]]:
        """Return the generation with the grammar of its calls and its answer, and the strict tools that it leaves out.

        Raises ApiError.
        """
        tools, answer = generation.tools, generation.options.get("grammar")
        syntax = self._format_of(tools).syntax
        if answer is None and not (tools.must_be_kept or tools.strict_places):
            return generation, ()
        if answer is not None and syntax.thought is None:
            if self.reply_format.channels is not None:
                raise refuse_field(generation.grammar_field, "this model's replies keep no form: leave it out")
            if not tools.tools:
                return generation, ()
        if tools.tools and not can_be_kept(syntax, tools, has_answer=answer is not None):
            if tools.must_be_kept:
                raise refuse_field(
                    "tool_choice", "a call cannot be enforced in this model's form of calls: use 'auto' or 'none'"
                )
            if answer is not None:
                raise refuse_field(
                    generation.grammar_field,
                    "a text in this form cannot call tools of this model: leave out tools, send tool_choice 'none', or "
                    "leave out the form",
                )
            return generation, tools.strict_places
        options = generation.options
        if syntax.thought is not None and options.get("stop"):
            raise refuse_field("stop", "replies of this model that keep a form have no stop strings: leave them out")
        if syntax.thought is not None or not (tools.must_call or answer is not None):
            # The grammar covers the reasoning as well.
            options = {**options, "reasoning": options.get("reasoning") if options.get("stop") else None}
        options = {**options, "grammar": grammar_of(syntax, tools, self.model.special_tokens, answer)}
        field_of_form = "tool_choice" if tools.must_be_kept else generation.grammar_field or "tools"
        return replace(generation, options=options, grammar_field=field_of_form), ()

    def leaves_calls_unread(self, tools: ToolChoice) -> bool:
        """Whether calls of these tools stay a part of the text."""
        return bool(tools.tools) and not self._format_of(tools).reads_calls

    def reader(self, tools: ToolChoice, prompt_end: str) -> ReplyReader:
        """Return a reader of the reply to a prompt with this end."""
        return ReplyReader(
            self._format_of(tools),
            tools=tools.tools,
            special_tokens=self.model.special_tokens,
            prompt_end=prompt_end,
            max_calls=None if tools.has_parallel_calls else 1,
        )

    def _format_of(self, tools: ToolChoice) -> ReplyFormat:
        """Return the form of a reply. A model without a known form of calls that must call has one of the gateway's."""
        return with_calls(self.reply_format) if tools.must_call else self.reply_format

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """The form in which it writes reasoning and tool calls."""
        return detect_format(self.model.chat_template, self.model.special_tokens)
