"""Plain values to messages of the protocol and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from specd.client.events import CompletionToken, Delta, Finished, Loading, RoundSummary
from specd.client.options import GenerationOptions
from specd.client.schema import Schema, schema_text
from specd.client.statistics import GenerationStatistics, RoundMeans
from specd.errors import InvalidRequestError
from specd.grammar import Grammar
from specd.json_text import to_json
from specd.protocol import PROTOCOL, PROTOCOL_METADATA
from specd.rpc.messages import (
    draft_source_message,
    finish_reason_from,
    log_probabilities_from,
    source_counts_from,
    to_grammar,
    to_parameters,
    token_source_from,
)
from specd.text.chat import Chat, PlacedToken
from specd.v1 import generation_pb2, sampling_pb2
from specd.vocabulary import DraftSource

_ROUND_FIELDS = [field.name for field in fields(RoundSummary) if field.name != "sources"]

Prompt = str | Sequence[int] | Chat | None


def to_request(prompt: Prompt, options: GenerationOptions, *, session_id: str = "") -> generation_pb2.GenerateRequest:
    """Return the message that asks for a generation.

    Raises InvalidRequestError for a value that no message can hold, and TypeError for an option that does not exist.
    """
    if unknown := sorted(options.keys() - GenerationOptions.__annotations__.keys()):
        raise TypeError(f"there is no option {', '.join(unknown)}: see specd.client.GenerationOptions")
    values = cast(dict[str, Any], options)
    try:
        request = generation_pb2.GenerateRequest(
            session_id=session_id,
            model=values.get("model", ""),
            max_tokens=values.get("max_tokens"),
            cut_max_tokens=values.get("cut_max_tokens", False),
            refuse_unloaded=values.get("refuse_unloaded", False),
            num_draft_tokens=values.get("num_draft_tokens"),
            top_log_probabilities=values.get("top_log_probabilities"),
            draft_source=draft_source_message(DraftSource(values.get("draft_source", DraftSource.AUTO))),
            sampling=to_parameters(values),
            stop=generation_pb2.StopConditions(
                ignore_eos=values.get("ignore_eos", False),
                min_tokens=values.get("min_tokens", 0),
                token_ids=values.get("stop_token_ids", ()),
                strings=_strings(values.get("stop") or ()),
                reasoning=_reasoning(values.get("reasoning")),
            ),
            echo=values.get("echo", False),
            grammar=_grammar(values.get("schema"), values.get("grammar")),
        )
        _set(request, prompt, "text", "token_ids")
        _set(request, values.get("prediction"), "prediction_text", "prediction_token_ids")
        _set(request, values.get("answer_start"), "answer_text", "answer_token_ids")
    except (ValueError, TypeError) as error:
        raise _unsendable(error) from error
    return request


def set_chat(request: generation_pb2.GenerateRequest, chat: Chat) -> None:
    """Let the request answer a conversation. Raises InvalidRequestError for a message that cannot be sent."""
    try:
        request.chat.CopyFrom(
            generation_pb2.Chat(
                messages=[
                    _message(message, chat.special_tokens.get(number, ()))
                    for number, message in enumerate(chat.messages)
                ],
                tools_json=_json(chat.tools),
                template_arguments_json=_json(chat.template_arguments),
                continue_final_message=chat.continue_final_message,
            )
        )
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequestError("OUT_OF_RANGE", f"the conversation cannot be sent: {error}") from error


def to_count(
    prompt: Prompt,
    options: GenerationOptions,
    *,
    session_id: str = "",
    return_token_ids: bool = False,
    add_special_tokens: bool = True,
) -> bytes:
    """Return the serialised message that asks for the tokens of a prompt. Raises as `to_request`."""
    request = generation_pb2.CountTokensRequest(
        generation=to_request(None, options, session_id=session_id),
        return_token_ids=return_token_ids,
        without_special_tokens=not add_special_tokens,
    )
    try:
        _set(request.generation, prompt, "text", "token_ids")  # in place, because a prompt can be long
    except (ValueError, TypeError) as error:
        raise _unsendable(error) from error
    return request.SerializeToString()


def metadata_of(options: GenerationOptions) -> list[tuple[str, str]]:
    """Return the metadata of a call."""
    token, traceparent = options.get("token"), options.get("traceparent")
    metadata = [(PROTOCOL_METADATA, str(PROTOCOL))]
    if token:
        metadata.append(("authorization", f"Bearer {token}"))
    if traceparent:
        metadata.append(("traceparent", traceparent))
    return metadata


def loading_from(progress: generation_pb2.LoadProgress) -> Loading:
    """Return the progress in a message."""
    return Loading(progress.process, progress.stage, progress.done_bytes, progress.total_bytes)


def delta_from(response: generation_pb2.GenerateResponse) -> Delta:
    """Return the tokens of a message."""
    round_ = response.round
    values = {name: getattr(round_, name) for name in _ROUND_FIELDS}
    return Delta(
        response.text,
        tuple(map(_token, response.tokens)),
        RoundSummary(**values, sources=source_counts_from(round_.sources)),
        response.session_id,
        finished_from(response),
        response.max_tokens,
        response.prompt_end,
        tuple(map(_token, response.prompt_tokens)),
    )


def finished_from(response: generation_pb2.GenerateResponse) -> Finished | None:
    """Return the end of a generation, if the message is the last."""
    if (reason := finish_reason_from(response.finish_reason)) is None:
        return None
    stopped_by = response.WhichOneof("stopped_by")
    return Finished(
        reason,
        _statistics(response.statistics),
        response.stop_string if stopped_by == "stop_string" else None,
        response.stop_token_id if stopped_by == "stop_token_id" else None,
    )


def _set(request: generation_pb2.GenerateRequest, value: Prompt, text_field: str, ids_field: str) -> None:
    if isinstance(value, Chat):
        set_chat(request, value)
    elif isinstance(value, str):
        setattr(request, text_field, value)
    elif value is not None:
        getattr(request, ids_field).ids.extend(value)


def _unsendable(error: Exception) -> InvalidRequestError:
    return InvalidRequestError("OUT_OF_RANGE", f"the request has a value that cannot be sent: {error}")


def _reasoning(markers: tuple[str, str] | None) -> generation_pb2.Reasoning | None:
    return generation_pb2.Reasoning(begin=markers[0], end=markers[1]) if markers is not None else None


def _grammar(schema: Schema | None, grammar: Grammar | None) -> sampling_pb2.Grammar | None:
    if schema is not None:
        if grammar is not None:
            raise InvalidRequestError("CONTRADICTION", "the request has both schema and grammar: leave one out")
        grammar = Grammar.json_schema(schema_text(schema))
    return to_grammar(grammar) if grammar is not None else None


def _strings(stop: str | Sequence[str]) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop


def _message(message: Mapping[str, Any], special_tokens: Sequence[PlacedToken]) -> generation_pb2.ChatMessage:
    others = {name: value for name, value in message.items() if name not in {"role", "content"}}
    return generation_pb2.ChatMessage(
        role=message["role"],
        content=message.get("content") or "",
        fields_json=_json(others),
        special_tokens=[generation_pb2.PlacedToken(position=position, id=each) for position, each in special_tokens],
    )


def _json(values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """Return values as JSON text, which keeps their order and numbers; empty if there are none."""
    if not values:
        return ""
    return to_json(dict(values) if isinstance(values, Mapping) else [dict(value) for value in values])


def _token(token: generation_pb2.GeneratedToken) -> CompletionToken:
    values = log_probabilities_from(token.log_probabilities) if token.HasField("log_probabilities") else None
    position = token.special_position if token.HasField("special_position") else None
    source = token_source_from(token.source)
    margin = token.margin if token.HasField("margin") else None
    return CompletionToken(token.id, token.text, source, values, position, token.own_bytes, margin, token.near_tie)


def _statistics(message: generation_pb2.SessionStatistics) -> GenerationStatistics:
    known = message.DESCRIPTOR.fields_by_name
    values = {each.name: getattr(message, each.name) for each in fields(GenerationStatistics) if each.name in known}
    means = {field.name: getattr(message.round_averages, field.name) for field in fields(RoundMeans)}
    values["round_averages"] = RoundMeans(**means)
    values["sources"] = source_counts_from(message.sources)
    for name in ("accepted_by_position", "proposed_by_position"):
        values[name] = tuple(values[name])
    for name in ("smallest_margin", "smallest_margin_position"):
        if not message.HasField(name):
            values[name] = None
    return GenerationStatistics(**values)
