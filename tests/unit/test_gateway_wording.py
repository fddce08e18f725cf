"""Errors of the coordinator in the words of HTTP."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gateway
from coordinator.sessions.prompt import EncodedPrompt, encode_prompt, encode_source, whole_conversation
from coordinator.sessions.request import GenerationRequest, StopConditions, check_prompt
from coordinator.sessions.session_store import KeptSession, SessionStore
from coordinator.sources import Sources
from gateway.chat.request import ChatFields
from gateway.completions.request import CompletionFields
from gateway.responses.request import ResponseFields
from gateway.wording import NAMES, field_of, in_http_words
from specd.errors import SpecdError
from specd.model_info import ModelInfo
from specd.sampling import Acceptance, Sampling
from specd.text.chat import Chat, ChatTemplate
from specd.v1 import generation_pb2
from specd.vocabulary import PROPOSERS, DraftSource
from tests.unit.test_validation import MODEL

HTTP = {name for fields in (ChatFields, CompletionFields, ResponseFields) for name in fields.model_fields}
# Fields that the gateway never sends, or that no error names.
UNSENT = {
    *("answer_text", "answer_token_ids", "return_prompt_token_ids"),
    *("prompt_fingerprint", "session_token_ids"),  # of a resumption
    "special_tokens",  # of a message of a session
    *("grammar.json_schema", "grammar.json_object"),  # named by the field that asks for them
    "fields_json",  # of a message: the gateway writes it
}


def fields_of(message: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for field in message.fields:
        yield prefix, field.name
        if field.message_type is not None and field.message_type.file.package == message.file.package:
            yield from fields_of(field.message_type, f"{field.name}.")


def test_every_field_of_grpc_has_a_name_in_http() -> None:
    """Those of one word are no field where they stand alone: sentences with `chat` are replaced as a whole."""
    names = {each for each in fields_of(generation_pb2.GenerateRequest.DESCRIPTOR) if "_" in each[1]}
    assert ("sampling.", "top_p") in names
    named = HTTP | NAMES.keys() | UNSENT
    assert {prefix + name for prefix, name in names if name not in named and prefix + name not in named} == set()


def a_session(**fields: Any) -> KeptSession:
    session = SessionStore(1, 100, lambda: 0.0, lambda: 0.0).begin("s1", client="")
    for name, value in fields.items():
        setattr(session, name, value)
    return session


CHAT = Chat(({"role": "user", "content": "x"},))
TEXT_SESSION = a_session(token_ids=array("I", [1]), num_turns=1)
CHAT_SESSION = a_session(token_ids=array("I", [1]), chat=CHAT)
ENCODER = ModelInfo(**{**vars(MODEL), "decoder_start_token_id": 0})
TOKENIZER: Any = None


def check(**fields: Any) -> Callable[[], Any]:
    return lambda: GenerationRequest(prompt="x", client="", **fields).check(MODEL, EncodedPrompt([1]))


@pytest.mark.parametrize(
    ("ask", "said", "param"),
    [
        (lambda: ChatTemplate().render(CHAT), "use /v1/completions with `prompt`", None),
        (
            lambda: encode_source(TOKENIZER, CHAT, None, TEXT_SESSION, ENCODER),
            "use /v1/completions with `prompt`",
            None,
        ),
        (lambda: check_prompt(MODEL, []), "the prompt is empty: set `prompt`", None),
        (lambda: check_prompt(MODEL, [10**6]), "prompt has 1000000, but", "prompt"),
        (check(stop=StopConditions(token_ids=(10**6,))), "stop_token_ids has 1000000, but", "stop_token_ids"),
        (check(stop=StopConditions(strings=("",))), "stop has '' of 0 characters", "stop"),
        (check(stop=StopConditions(min_tokens=9), max_tokens=3), "at most max_output_tokens, which is 3", "min_tokens"),
        (check(max_tokens=10**6), "and max_output_tokens 1000000 make", None),
        (check(sampling=Sampling(temperature=200)), "temperature is 200", "temperature"),
        (
            check(sampling=Sampling(lenience=0.5, acceptance=Acceptance.COUPLED)),
            "acceptance is 'coupled', which has no lenience: set 'rejection'",
            "lenience",
        ),
        (
            lambda: Sources.of(DraftSource.MODEL, None, (), default_k=None, predicts=False),
            "draft_source is 'model', but",
            "draft_source",
        ),
        (lambda: whole_conversation(CHAT, TEXT_SESSION), "session s1 is a completion, and", None),
        (lambda: encode_prompt(TOKENIZER, "x", CHAT_SESSION), "session s1 is a conversation, and", None),
    ],
)
def test_an_error_names_fields_and_endpoints_of_http(ask: Callable[[], Any], said: str, param: str | None) -> None:
    with pytest.raises(SpecdError) as raised:
        ask()
    words = in_http_words(raised.value.reason, str(raised.value), max_tokens="max_output_tokens")
    assert said in words
    assert field_of(words) == param
    foreign = rf"(?<![\w/])({'|'.join(map(re.escape, NAMES))}|max_tokens|COUPLED|REJECTION|NONE|MODEL)\b|`text`|`chat`"
    assert not re.search(foreign, words)


def test_what_a_template_says_stays() -> None:
    quoted = "the chat template failed: token_ids is MODEL"
    assert in_http_words("CHAT_TEMPLATE_FAILED", quoted) == quoted


def test_the_page_has_a_colour_for_each_source() -> None:
    styles = (Path(gateway.__file__).parent / "static" / "page.css").read_text()
    for place, source in enumerate(PROPOSERS):
        assert f".source-{place} {{" in styles, source
