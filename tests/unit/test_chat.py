"""Chat prompts: equal to those of transformers, or errors that name the problem."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from specd.errors import InvalidRequestError
from specd.settings import EMBEDDED_TARGET
from specd.text.chat import Chat, ChatTemplate, Reply, plain
from specd.text.tokenizer import Tokenizer
from tests.encoding import encode_chat
from tests.unit.conversations import CHATML, LLAMA, QUESTION, REPLY, SECOND_QUESTION, SPECIAL_TOKENS, SYSTEM, TOOL

TOKENIZER_FILE = Path(EMBEDDED_TARGET) / "tokenizer.json"
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"days": 3}}}],
}
RESULT = {"role": "tool", "content": "-3 degrees"}

CHATS = {
    "one question": Chat((QUESTION,)),
    "system": Chat((SYSTEM, QUESTION, REPLY, SECOND_QUESTION)),
    "tools": Chat((SYSTEM, QUESTION), tools=(TOOL, TOOL)),
    "arguments": Chat((QUESTION,), template_arguments={"enable_thinking": False, "date_string": "26 Jul 2024"}),
    "continued": Chat((QUESTION, REPLY), continue_final_message=True),
    "continued after nothing": Chat((QUESTION, {"role": "assistant", "content": ""}), continue_final_message=True),
    "continued after space": Chat((QUESTION, {"role": "assistant", "content": "It "}), continue_final_message=True),
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL_TOKENS, "tiny")


def refusal(source: str, chat: Chat) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render(chat)
    return caught.value


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("source", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_prompts_are_those_of_transformers(source: str, chat: Chat) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER_FILE), chat_template=source, **SPECIAL_TOKENS)
    options: dict[str, Any] = {
        "tools": list(chat.tools) or None,
        "add_generation_prompt": not chat.continue_final_message,
        "continue_final_message": chat.continue_final_message,
        **chat.template_arguments,
    }
    messages = [dict(message) for message in chat.messages]
    expected = reference.apply_chat_template(messages, tokenize=False, **options)
    assert template(source).render(chat) == expected
    tokenizer = Tokenizer(TOKENIZER_FILE.read_bytes(), template(source))
    expected_ids = reference.apply_chat_template(messages, return_dict=False, **options)
    assert encode_chat(tokenizer, chat) == expected_ids


def test_a_prompt_in_full() -> None:
    chat = Chat((SYSTEM, QUESTION, REPLY, SECOND_QUESTION), template_arguments={"enable_thinking": False})
    assert template(CHATML).render(chat) == (
        "<|im_start|>system\n  Be brief.\n<|im_end|>\n"
        "<|im_start|>user\nWhat does \N{SNOWMAN} mean? <|im_end|>\n"
        "<|im_start|>assistant\nWinter.<|im_end|>\n"
        "<|im_start|>user\ndef winter():<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_the_template_writes_the_special_tokens_once() -> None:
    tokenizer = Tokenizer(TOKENIZER_FILE.read_bytes(), template(LLAMA))
    ids = encode_chat(tokenizer, Chat((QUESTION,)))
    begin = tokenizer.encode("")
    assert len(begin) == 1  # the token that `encode` puts in front of a text
    assert ids[:1] == begin
    assert ids.count(begin[0]) == 1
    assert tokenizer.encode("x") == [*begin, *tokenizer.encode("x", add_special_tokens=False)]


def test_encoding_in_a_thread_lets_others_run() -> None:
    tokenizer = Tokenizer(TOKENIZER_FILE.read_bytes())
    text = "def f(x): return x\n" * 50_000
    turns = 0
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(tokenizer.encode, text)
        while not encoding.done():
            turns += 1
            time.sleep(0.001)
    assert turns > 20  # a lock held throughout leaves one or two
    assert len(encoding.result()) > 100_000


def test_decoding_shows_or_skips_special_tokens() -> None:
    tokenizer = Tokenizer(TOKENIZER_FILE.read_bytes())
    ids = tokenizer.encode("x = 1")
    assert tokenizer.decode(tuple(ids), skip_special_tokens=True) == "x = 1"
    assert tokenizer.decode(tuple(ids), skip_special_tokens=False) == "<|endoftext|>x = 1"


def test_further_fields_of_a_message_reach_the_template() -> None:
    prompt = template(CHATML).render(Chat((QUESTION, CALL, RESULT)))
    assert '<tool_call>weather {"days": 3}</tool_call>' in prompt
    assert "<tool_response>-3 degrees</tool_response>" in prompt


def test_fields_without_a_value_are_as_if_they_were_not_there() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls is defined }}{% endfor %}"
    assert template(source).render(Chat(({**QUESTION, "content": "x", "tool_calls": None},))) == "xFalse"


def test_no_tools_are_none() -> None:
    assert template("{{ tools is none }}").render(Chat((QUESTION,))) == "True"
    assert template("{{ tools is none }}").render(Chat((QUESTION,), tools=(TOOL,))) == "False"


def test_documents_reach_the_template() -> None:
    source = "{{ documents[0].title }}{{ messages[0].content }}"
    chat = Chat(({"role": "user", "content": "x"},), template_arguments={"documents": [{"title": "T"}]})
    assert template(source).render(chat) == "Tx"


def test_a_template_cannot_change_the_conversation() -> None:
    chat = Chat(({"role": "user", "content": "x", "fields": [1]},))
    assert refusal("{{ messages[0].fields.append(2) }}", chat).reason == "CHAT_TEMPLATE_FAILED"
    assert chat.messages[0]["fields"] == [1]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('only questions about snow') }}", "only questions about snow"),
        ("{{ messages[0].name.first }}", "no attribute 'name'"),
        ("{{ 1 + messages[0].content }}", "TypeError"),
        ("{{ {}['role'].x }}", "no attribute 'role'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{% if %}", "Expected an expression"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_a_failing_template_says_why(source: str, why: str) -> None:
    error = refusal(source, Chat((QUESTION,)))
    assert error.reason == "CHAT_TEMPLATE_FAILED"
    assert str(error).startswith("the chat template of the model tiny failed: ")
    assert why in str(error)


def test_roles_in_the_wrong_order_are_the_template_s_to_refuse() -> None:
    error = refusal(LLAMA, Chat((QUESTION, QUESTION)))
    assert str(error) == (
        "the chat template of the model tiny failed: "
        "Conversation roles must alternate user/assistant/user/assistant/..."
    )


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    error = refusal(source, Chat((QUESTION, REPLY), continue_final_message=True))
    assert error.reason == "CHAT_TEMPLATE_FAILED"
    assert "continue_final_message" in str(error)


def test_an_error_does_not_repeat_a_long_conversation() -> None:
    long = {"role": "user", "content": "x" * 1_000_000}
    assert len(str(refusal("{{ raise_exception(messages[0].content) }}", Chat((long,))))) < 1000


def test_a_model_without_a_template_says_what_to_send() -> None:
    error = refusal("", Chat((QUESTION,)))
    assert error.reason == "NO_CHAT_TEMPLATE"
    assert str(error) == "the model tiny has no chat template: send the prompt as `text` or `token_ids`"
    with pytest.raises(InvalidRequestError, match=r"^the model has no chat template"):
        encode_chat(Tokenizer(TOKENIZER_FILE.read_bytes()), Chat((QUESTION,)))


def test_a_conversation_needs_a_message() -> None:
    assert refusal(CHATML, Chat(())).reason == "EMPTY_PROMPT"


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "conversation",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "return_dict",
        "sanitize_control_tokens",
        "self",
    ],
)
def test_template_arguments_are_for_the_template(name: str) -> None:
    error = refusal(CHATML, Chat((QUESTION,), template_arguments={name: True, "enable_thinking": False}))
    assert error.reason == "OUT_OF_RANGE"
    assert f"template_arguments has {name}:" in str(error)


@pytest.mark.parametrize("name", ["raise_exception", "namespace", "kwargs", "environment", "context", "__class__", ""])
def test_any_other_name_is_a_variable(name: str) -> None:
    with_argument = Chat((QUESTION,), template_arguments={name: 1})
    assert template(CHATML).render(with_argument) == template(CHATML).render(Chat((QUESTION,)))


def test_a_conversation_goes_on() -> None:
    first = Chat((SYSTEM, QUESTION), tools=(TOOL,), template_arguments={"a": 1, "b": 2})
    second = first.replied(Reply("Winter.")).followed_by(Chat((SECOND_QUESTION,), template_arguments={"b": 3}))
    assert second == Chat(
        (SYSTEM, QUESTION, REPLY, SECOND_QUESTION), tools=(TOOL,), template_arguments={"a": 1, "b": 3}
    )
    assert first == Chat((SYSTEM, QUESTION), tools=(TOOL,), template_arguments={"a": 1, "b": 2})
    other_tool = {"type": "function", "function": {"name": "time"}}
    assert second.replied(Reply("x")).followed_by(Chat((RESULT,), tools=(other_tool,))).tools == (other_tool,)


def test_a_message_that_was_continued_stays_one_message() -> None:
    first = Chat((QUESTION, {"role": "assistant", "content": "Win", "name": "a"}), continue_final_message=True)
    second = first.replied(Reply("ter.")).followed_by(Chat((SECOND_QUESTION,)))
    assert second == Chat((QUESTION, {**REPLY, "name": "a"}, SECOND_QUESTION))
    begun = {"role": "assistant", "content": "It is"}
    third = second.replied(Reply("pass")).followed_by(Chat((QUESTION, begun), continue_final_message=True))
    assert third.continue_final_message
    assert third.messages[-2:] == (QUESTION, begun)


@pytest.mark.parametrize("source", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_what_is_said_stays_when_a_conversation_goes_on(source: str) -> None:
    first = Chat((SYSTEM, QUESTION))
    second = first.replied(Reply("Winter.")).followed_by(Chat((SECOND_QUESTION,)))
    assert template(source).render(second).startswith(template(source).render(first) + "Winter.")


def test_a_tool_that_came_as_a_struct_reads_as_it_was_written() -> None:
    struct = struct_pb2.Struct()
    json_format.ParseDict(TOOL, struct)
    assert "5.0" in repr(json_format.MessageToDict(struct))  # what `plain` is for
    for form in (struct, json_format.MessageToDict(struct)):
        assert json.dumps(plain(form)) == json.dumps(TOOL)
    assert '"maximum": 5, "minimum": 0.5' in template(CHATML).render(Chat((QUESTION,), tools=(plain(struct),)))


def test_the_order_of_keys_does_not_depend_on_how_they_came() -> None:
    keys = ["type", "name", "description", *"abcdefghijklmnopqrstuvwxyz"]
    assert list(plain(dict.fromkeys(reversed(keys), 0))) == keys


@pytest.mark.parametrize("value", [1e300, float("inf"), True, False, None, "5.0", [], {}, [[1]], {"a": [None]}])
def test_other_values_stay_as_they_are(value: Any) -> None:
    struct = struct_pb2.Struct()
    struct["value"] = value
    result = plain(struct)["value"]
    assert (result, type(result)) == (value, type(value))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=3))
def test_what_goes_through_a_struct_comes_out_the_same(value: dict[str, Any]) -> None:
    struct = struct_pb2.Struct()
    json_format.ParseDict(value, struct)
    assert json.dumps(plain(struct), sort_keys=True) == json.dumps(value, sort_keys=True)
