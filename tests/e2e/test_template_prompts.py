"""Prompts that the chat templates of published models make: the same as transformers makes of a conversation.

Ours go the way of a generation: messages of the protocol, which the service reads, and the coordinator's renderer.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import pytest
from google.protobuf import struct_pb2
from prometheus_client import CollectorRegistry
from pydantic_core import to_json
from transformers import PreTrainedTokenizerFast

from coordinator.coordinator import Coordinator
from coordinator.proposals.drafter import DraftStream
from coordinator.service import request_from
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.caller import Caller
from specd.client.options import GenerationOptions
from specd.client.protocol.wire import to_request
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import InvalidRequestError
from specd.text.chat import Chat, ChatTemplate
from specd.text.rendering import MEMORY_BYTES, MOST_CHARACTERS, CheckBeginning, TemplateRenderer
from specd.text.template_process import _answer
from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import GenerateRequest
from tests.unit.mortal_server import MODEL
from tests.unit.served_models import new_store
from tests.unit.tokenizers_by_kind import raw_tokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
RAW = raw_tokenizer("byte-level BPE")
TOKENIZER = Tokenizer(RAW.to_str().encode())
REFERENCE = PreTrainedTokenizerFast(tokenizer_object=RAW, **SPECIAL_TOKENS)

ARGUMENTS = {
    "pattern": "def",
    "include": "*.py",
    "channel": 1234567890123456789,
    "ratio": 2.0,
    "small": 1e-7,
    "nested": {"z": [3, 2.0, {"b": None, "a": True}], "a": {"y": "ü ☃ \U0001f600", "x": []}},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Where: a “path”."},
        "body": {"type": "string", "enum": ["b", "a", "ü"], "default": "b"},
        "mode": {"type": "integer", "maximum": 9007199254740993, "default": 2.0, "minimum": -1},
    },
    "required": ["path", "body"],
}
WRITE = {"type": "function", "function": {"name": "write", "description": "Writes.", "parameters": SCHEMA}}
GREP = {
    "function": {
        "parameters": {
            "required": [],
            "properties": {"z": {"type": "string"}, "a": {"type": "number"}},
            "type": "object",
        },
        "strict": True,
        "name": "grep",
        "description": "Finds “text”.",
    },
    "type": "function",
}
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Where is it? ☃"}


def call(number: int, name: str = "grep", arguments: Any = ARGUMENTS) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(number: int, content: str = '{"found": 2.0}') -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": "grep", "content": content}


def calls(*of: dict[str, Any], content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*of], **fields}


ARGUED = {"enable_thinking": False, "z": 2.0, "documents": [{"title": "T", "text": "ü", "doc_id": 2**63, "b": 1.0}]}
SAID = {"role": "assistant", "content": "Here."}
CHATS: Mapping[str, Chat] = {
    "a question": Chat((SYSTEM, QUESTION)),
    "tools": Chat((SYSTEM, QUESTION), (WRITE, GREP)),
    "a call": Chat((QUESTION, calls(call(1)), answer(1)), (WRITE, GREP)),
    "a call, then a question": Chat((SYSTEM, QUESTION, calls(call(1)), answer(1), SAID, QUESTION), (GREP, WRITE)),
    "calls at once": Chat((QUESTION, calls(call(1), call(2, "write")), answer(1), answer(2)), (WRITE, GREP)),
    "a call with words": Chat((QUESTION, calls(call(1), content="I look."), answer(1), SAID, QUESTION), (GREP,)),
    "arguments as text": Chat((QUESTION, calls(call(1, arguments=json.dumps(ARGUMENTS))), answer(1)), (GREP,)),
    "further fields": Chat(
        (
            {**QUESTION, "name": "ann"},
            {**calls(call(1)), "reasoning_content": "Hm.", "thinking": "Hm.", "meta": {"z": 2.0, "a": 2**63}},
            answer(1),
        ),
        (WRITE,),
    ),
    "template arguments": Chat((SYSTEM, QUESTION, SAID, QUESTION), (WRITE,), ARGUED),
    "a reply to continue": Chat((QUESTION, SAID), (), {}, continue_final_message=True),
}


class _Renderer(TemplateRenderer):
    """Renders as the process for templates does, in this process."""

    async def _start(self) -> asyncio.subprocess.Process:
        return cast(asyncio.subprocess.Process, None)

    async def _rendered(self, process: asyncio.subprocess.Process, chat: Chat, check: CheckBeginning) -> str:
        chat = Chat(**json.loads(to_json(asdict(chat))))
        answer, prompt = _answer(self._template, chat, MEMORY_BYTES, MOST_CHARACTERS)
        if "reason" in answer:
            raise InvalidRequestError(answer["reason"], answer["error"])
        return prompt.decode()


def coordinator_of(source: str) -> Coordinator:
    template = ChatTemplate(source, SPECIAL_TOKENS, "published")
    tokenizer = copy(TOKENIZER)
    tokenizer.template = template
    coordinator = Coordinator(
        CoordinatorSettings.model_validate({"draft": "none"}),
        CoordinatorMetrics(CollectorRegistry()),
        model=MODEL,
        tokenizer=tokenizer,
        targets=Workers([RemoteWorker[TargetStream]("TARGET_UNAVAILABLE")]),
        sessions=new_store(),
        drafts=Workers([RemoteWorker[DraftStream]("DRAFT_NOT_CONFIGURED")]),
    )
    coordinator.renderer = _Renderer(template, seconds=60.0)
    return coordinator


async def prompt_of(coordinator: Coordinator, message: GenerateRequest) -> str | None:
    """Return the prompt of a request, which is encoded and decoded; None if the template refuses it."""
    request = request_from(GenerateRequest.FromString(message.SerializeToString()), "", Caller(""))
    kept = coordinator.sessions.begin("s", "")
    try:
        prompt = await coordinator.encode(request, kept)
    except InvalidRequestError as error:
        assert error.reason == "CHAT_TEMPLATE_FAILED"
        return None
    finally:
        coordinator.sessions.abandon(kept)
    return coordinator.decode_text(prompt.token_ids)


def expected_of(source: str, chat: Chat) -> str | None:
    """Return the prompt that transformers makes; None if it refuses."""
    tools: Any = [*chat.tools]
    try:
        prompt: Any = REFERENCE.apply_chat_template(
            [dict(message) for message in chat.messages],
            chat_template=source,
            tools=tools or None,
            add_generation_prompt=not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **chat.template_arguments,
        )
    except Exception:  # a template can raise any error on an unsuitable conversation
        return None
    return cast(str, prompt)


def in_structs(chat: Chat) -> GenerateRequest:
    """Return the message in which tools, calls and template arguments are Structs, as older clients send them."""
    request = to_request(chat, GenerationOptions())
    for message in request.chat.messages:
        if message.fields_json:
            message.fields.update(json.loads(message.fields_json))
            message.fields_json = ""
    for tool in chat.tools:
        request.chat.tools.add().update(tool)
    request.chat.template_arguments.CopyFrom(struct_pb2.Struct())
    request.chat.template_arguments.update(chat.template_arguments)
    request.chat.tools_json = request.chat.template_arguments_json = ""
    return request


@dataclass
class Count:
    """Templates and conversations, by their outcome."""

    others: list[tuple[str, str]] = field(default_factory=list)
    in_structs: set[str] = field(default_factory=set)
    num: Counter[str] = field(default_factory=Counter)

    async def add(self, name: str, source: str) -> None:
        """Compare the prompts of a template."""
        coordinator = coordinator_of(source)
        for chat_name, chat in CHATS.items():
            expected = expected_of(source, chat)
            self.num["refused" if expected is None else "written"] += 1
            if await prompt_of(coordinator, to_request(chat, GenerationOptions())) != expected:
                self.others.append((name, chat_name))
            if name not in self.in_structs and await prompt_of(coordinator, in_structs(chat)) != expected:
                self.in_structs.add(name)


async def test_published_templates_write_what_transformers_writes(
    templates: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    count = Count()
    for name, source in templates.items():
        await count.add(name, source)
    differ = {name for name, _ in count.others}
    with capsys.disabled():
        print(
            f"\n{len(templates) - len(differ)} of {len(templates)} published templates render as transformers does: "
            f"{count.num['written']} prompts the same, {count.num['refused']} conversations refused by both "
            f"({len(count.in_structs)} templates render otherwise from Structs)"
        )
    assert count.others == []
    # The conversations show what Structs lose.
    assert len(count.in_structs) > 50
