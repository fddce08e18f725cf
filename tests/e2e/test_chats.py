"""Chats, through real processes: their prompts, their continuation in a session, and a second end token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from transformers import PreTrainedTokenizerFast

from specd.errors import error_info
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import DRAFT_SOURCE_MODEL, FINISH_REASON_EOS, FINISH_REASON_LENGTH, Chat, StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from specd.v1.session_pb2_grpc import SessionServiceStub
from tests.e2e.calls import END_TOKEN, error_of
from tests.e2e.chats import QUESTION, REPLY, SYSTEM, TOOL, chat_of
from tests.e2e.completions import MAX_TOKENS, Completion, complete
from tests.e2e.kept_sessions import IGNORE_EOS, MAX_LOST, get_session
from tests.raw_client import RawClient
from tests.worker.models import CHAT_TEMPLATE, SECOND_END_TOKEN, save_chat_target

PAD_TOKEN = 1  # special, as the marks of a tool call are

CHATS: dict[str, dict[str, Any]] = {
    "question": {"messages": [QUESTION]},
    "conversation": {"messages": [SYSTEM, QUESTION, REPLY, QUESTION]},
    "continued": {"messages": [QUESTION, REPLY], "continue_final_message": True},
    "fields": {"messages": [{**QUESTION, "aside": "  # please"}]},
    "tools": {"messages": [QUESTION], "tools": [TOOL, TOOL]},
    "arguments": {"messages": [QUESTION], "template_arguments": {"opening": "def", "unused": 3}},
}


async def refusal(client: RawClient, prompt: str | Sequence[int] | Chat, **fields: Any) -> tuple[str, str]:
    """Generate, and return reason and message of the INVALID_ARGUMENT that comes of it."""
    error = await error_of(client.generate(prompt, **fields))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error_info(error).reason, error.details() or ""


@pytest.fixture(scope="module")
async def chat_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(
        target=save_chat_target(tmp_path_factory.mktemp("chat") / "target"), draft=EMBEDDED_DRAFT
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def chat_client(chat_stack: Stack) -> AsyncIterator[RawClient]:
    async with RawClient(chat_stack.address) as connected:
        yield connected


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_each_end_token_ends_the_text(
    chat_client: RawClient, client: RawClient, greedy: Completion, num_draft_tokens: int
) -> None:
    assert set((await chat_client.model_info()).target.eos_token_ids) == {END_TOKEN, SECOND_END_TOKEN}
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "num_draft_tokens": num_draft_tokens}
    ended = await complete(chat_client, **fields)
    num_tokens = greedy.token_ids.index(SECOND_END_TOKEN) + 1
    assert ended.token_ids == greedy.token_ids[:num_tokens]
    assert ended.last.finish_reason == FINISH_REASON_EOS

    ignored = await complete(chat_client, stop=StopConditions(ignore_eos=True), **fields)
    assert ignored.token_ids == greedy.token_ids
    assert ignored.last.finish_reason == FINISH_REASON_LENGTH

    at_once = await complete(chat_client, sampling=SamplingParameters(logit_bias={END_TOKEN: 100}), **fields)
    assert at_once.token_ids == [END_TOKEN]

    later = await complete(chat_client, stop=StopConditions(min_tokens=num_tokens), **fields)
    like = await complete(client, stop=StopConditions(min_tokens=num_tokens, token_ids=[SECOND_END_TOKEN]), **fields)
    assert later.token_ids == like.token_ids
    assert SECOND_END_TOKEN not in later.token_ids[:num_tokens]


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
async def test_a_conversation_is_the_prompt_that_transformers_makes_of_it(
    chat_client: RawClient, chat: dict[str, Any]
) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(EMBEDDED_TARGET) / "tokenizer.json"), chat_template=CHAT_TEMPLATE
    )
    token_ids: Any = reference.apply_chat_template(
        chat["messages"],
        tools=chat.get("tools"),
        add_generation_prompt=not chat.get("continue_final_message"),
        continue_final_message=chat.get("continue_final_message", False),
        return_dict=False,
        **chat.get("template_arguments", {}),
    )
    fields: dict[str, Any] = {"max_tokens": 8, "stop": StopConditions(ignore_eos=True)}
    expected = await complete(chat_client, token_ids, num_draft_tokens=0, **fields)
    completion = await complete(chat_client, chat_of(**chat), **fields)
    assert completion.statistics.prompt_tokens == len(token_ids)
    assert completion.token_ids == expected.token_ids
    assert completion.text == expected.text


async def test_what_is_wrong_with_a_conversation_is_said(client: RawClient, chat_client: RawClient) -> None:
    reason, message = await refusal(client, chat_of([QUESTION]))
    assert reason == "NO_CHAT_TEMPLATE"
    assert Path(EMBEDDED_TARGET).name in message
    assert EMBEDDED_TARGET not in message  # clients must not learn its directory
    # What the template says can be more than a status has room for.
    for content in ("this", "\N{SNOWMAN}" * 10_000):
        said = [QUESTION, {"role": "nobody", "content": content}]
        reason, message = await refusal(chat_client, chat_of(said))
        assert reason == "CHAT_TEMPLATE_FAILED"
        assert f"nobody may not say {content[:100]}" in message
    reason, message = await refusal(chat_client, chat_of([]))
    assert reason == "EMPTY_PROMPT"
    reason, message = await refusal(chat_client, chat_of([QUESTION], template_arguments={"tokenize": True}))
    assert reason == "OUT_OF_RANGE"
    assert "tokenize" in message
    reason, message = await refusal(chat_client, chat_of([{**QUESTION, "content": "pass\n" * 3000}]))
    assert reason == "CONTEXT_EXCEEDED"


async def test_a_tool_can_be_deep(chat_client: RawClient) -> None:
    tool: dict[str, Any] = {}
    for _ in range(30):
        tool = {"deeper": tool}
    completion = await complete(chat_client, chat_of([QUESTION], tools=[tool]), max_tokens=2)
    assert completion.statistics.prompt_tokens > 30


async def test_a_conversation_goes_on(chat_client: RawClient) -> None:
    sessions = SessionServiceStub(chat_client.channel)
    fields: dict[str, Any] = {
        "max_tokens": 8,
        "stop": IGNORE_EOS,
        "draft_source": DRAFT_SOURCE_MODEL,
        "return_prompt_token_ids": True,
    }
    arguments = {"opening": "def"}
    first = await complete(chat_client, chat_of([SYSTEM, QUESTION], [TOOL], arguments), **fields)
    session_id = first.last.session_id
    said = [SYSTEM, QUESTION, {"role": "assistant", "content": first.text}]

    tokenizer = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes())

    def prompt_of(turn: Completion) -> list[int]:
        return list(turn.responses[0].prompt_token_ids)

    async def same_as_a_new_one(turn: Completion, chat: Chat) -> None:
        """The prompt is the same text, though the replies in it keep their tokens."""
        new = await complete(chat_client, chat, max_tokens=1, return_prompt_token_ids=True)
        texts = [tokenizer.decode(prompt_of(each), skip_special_tokens=False) for each in (turn, new)]
        assert texts[0] == texts[1]
        alone = await complete(chat_client, prompt_of(turn), num_draft_tokens=0, **fields)
        assert alone.last.session_id != session_id
        assert turn.last.session_id == session_id
        assert turn.token_ids == alone.token_ids
        assert turn.text == alone.text

    # Only what is new comes; tools and arguments stay.
    second = await complete(chat_client, chat_of([QUESTION]), session_id=session_id, **fields)
    said.append(QUESTION)
    # All up to the reply: the template writes no opening before a reply of the past.
    for reused in (second.statistics.target_reused_tokens, second.statistics.draft_reused_tokens):
        assert first.statistics.prompt_tokens - 1 <= reused < second.statistics.prompt_tokens
    await same_as_a_new_one(second, chat_of(said, [TOOL], arguments))
    said.append({"role": "assistant", "content": second.text})

    # With other tools and arguments.
    tools = [TOOL, {"type": "function", "function": {"name": "stop"}}]
    third = await complete(chat_client, chat_of([QUESTION], tools, {"opening": ""}), session_id=session_id, **fields)
    said.append(QUESTION)
    await same_as_a_new_one(third, chat_of(said, tools, {"opening": ""}))

    # The reply itself continues.
    fourth = await complete(chat_client, "", session_id=session_id, **fields)
    num_before = third.statistics.prompt_tokens + len(third.tokens)
    assert fourth.statistics.prompt_tokens == num_before
    assert fourth.statistics.target_reused_tokens >= num_before - MAX_LOST
    said.append({"role": "assistant", "content": third.text + fourth.text})

    # A message that the client begins, and the model ends.
    fifth = await complete(
        chat_client, chat_of([QUESTION, REPLY], continue_final_message=True), session_id=session_id, **fields
    )
    said += [QUESTION, REPLY]
    await same_as_a_new_one(fifth, chat_of(said, tools, {"opening": ""}, continue_final_message=True))
    said[-1] = {**REPLY, "content": REPLY["content"] + fifth.text}
    sixth = await complete(chat_client, chat_of([QUESTION]), session_id=session_id, **fields)
    before = [*prompt_of(fifth), *fifth.token_ids]
    assert prompt_of(sixth)[: len(before)] == before
    await same_as_a_new_one(sixth, chat_of([*said, QUESTION], tools, {"opening": ""}))
    assert (await get_session(sessions, session_id)).session.num_turns == 6

    failing = chat_of([{"role": "nobody", "content": ""}])
    wrong: list[tuple[str | list[int] | Chat, str]] = [
        ("x", "CONTRADICTION"),
        ([5], "CONTRADICTION"),
        (chat_of([]), "EMPTY_PROMPT"),
        (failing, "CHAT_TEMPLATE_FAILED"),
    ]
    for prompt, expected in wrong:
        reason, _ = await refusal(chat_client, prompt, session_id=session_id)
        assert reason == expected
    assert (await get_session(sessions, session_id)).session.num_turns == 6


async def test_a_reply_keeps_its_special_tokens_and_its_cache(chat_client: RawClient) -> None:
    """A sampled reply with many special tokens, and with text that the tokenizer would write otherwise."""
    sampling = SamplingParameters(temperature=1.0, seed=3, top_k=200, logit_bias={PAD_TOKEN: 18}, frequency_penalty=1.0)
    fields: dict[str, Any] = {"max_tokens": 60, "stop": IGNORE_EOS, "return_prompt_token_ids": True}
    first = await complete(chat_client, chat_of([QUESTION]), sampling=sampling, **fields)
    assert 5 < first.token_ids.count(PAD_TOKEN) < 55
    assert [token.id for token in first.tokens if token.HasField("special_position")].count(PAD_TOKEN) > 5
    second = await complete(chat_client, chat_of([QUESTION]), session_id=first.last.session_id, **fields)
    before = [*first.responses[0].prompt_token_ids, *first.token_ids]
    # Behind the last special token, the tokenizer may join the reply's text with what the template writes after it.
    num_kept = len(before) - before[::-1].index(PAD_TOKEN)
    assert list(second.responses[0].prompt_token_ids[:num_kept]) == before[:num_kept]
    assert second.statistics.target_reused_tokens >= num_kept - MAX_LOST


async def test_a_session_of_text_takes_no_conversation(chat_client: RawClient) -> None:
    turn = await complete(chat_client, max_tokens=2)
    reason, _ = await refusal(chat_client, chat_of([QUESTION]), session_id=turn.last.session_id)
    assert reason == "CONTRADICTION"
