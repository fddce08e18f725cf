"""Chat prompts: what transformers makes of a conversation, and errors that say what is wrong with it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from coordinator.chat import Chat, ChatTemplate, plain
from coordinator.tokenizer import Tokenizer
from coordinator.worker_link import WorkerLink
from specd.deferred import Deferred
from specd.errors import InvalidRequestError
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.v1 import model_pb2_grpc
from specd.worker.model import LoadedModel, TokenizerConfig, load
from specd.worker.model_service import ModelService
from specd.worker.worker import Worker

TOKENIZER_FILE = Path(EMBEDDED_TARGET) / "tokenizer.json"
SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}

# In the style of Qwen: no beginning token, tools as JSON, an argument that switches thinking off.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# In the style of Llama 3: a beginning token, a date, trimmed contents, and roles that must alternate.
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%Y') %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
QUESTION = {"role": "user", "content": "What does \N{SNOWMAN} mean? "}
REPLY = {"role": "assistant", "content": "Winter."}
SECOND_QUESTION = {"role": "user", "content": "def winter():"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <what> it is like & where",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer", "maximum": 5, "minimum": 0.5}}},
    },
}
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
    assert tokenizer.encode_chat(chat) == expected_ids


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
    ids = tokenizer.encode_chat(Chat((QUESTION,)))
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
        Tokenizer(TOKENIZER_FILE.read_bytes()).encode_chat(Chat((QUESTION,)))


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
    second = first.replied("Winter.").followed_by(Chat((SECOND_QUESTION,), template_arguments={"b": 3}))
    assert second == Chat(
        (SYSTEM, QUESTION, REPLY, SECOND_QUESTION), tools=(TOOL,), template_arguments={"a": 1, "b": 3}
    )
    assert first == Chat((SYSTEM, QUESTION), tools=(TOOL,), template_arguments={"a": 1, "b": 2})
    other_tool = {"type": "function", "function": {"name": "time"}}
    assert second.replied("x").followed_by(Chat((RESULT,), tools=(other_tool,))).tools == (other_tool,)


def test_a_message_that_was_continued_stays_one_message() -> None:
    first = Chat((QUESTION, {"role": "assistant", "content": "Win", "name": "a"}), continue_final_message=True)
    second = first.replied("ter.").followed_by(Chat((SECOND_QUESTION,)))
    assert second == Chat((QUESTION, {**REPLY, "name": "a"}, SECOND_QUESTION))
    begun = {"role": "assistant", "content": "It is"}
    third = second.replied("pass").followed_by(Chat((QUESTION, begun), continue_final_message=True))
    assert third.continue_final_message
    assert third.messages[-2:] == (QUESTION, begun)


@pytest.mark.parametrize("source", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_what_is_said_stays_when_a_conversation_goes_on(source: str) -> None:
    first = Chat((SYSTEM, QUESTION))
    second = first.replied("Winter.").followed_by(Chat((SECOND_QUESTION,)))
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


CODE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from coordinator.chat import Chat, ChatTemplate
assert "transformers" not in sys.modules and "jinja2" not in sys.modules
template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
with ThreadPoolExecutor(8) as threads:
    prompts = set(threads.map(lambda i: template.render(Chat(({"role": "user", "content": "x"},))), range(64)))
print(prompts, sorted({m.split(".")[0] for m in sys.modules} & {"mlx", "mlx_lm", "torch"}))
"""


def test_threads_can_render_first_and_without_mlx() -> None:
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "{'<s>x'} []"


def directory_with(directory: Path, *, jinja: str = "", config: object = None) -> str:
    """Make a copy of the embedded draft with a chat template in a file of its own or in tokenizer_config.json."""
    directory.mkdir()
    for path in Path(EMBEDDED_DRAFT).iterdir():
        (directory / path.name).symlink_to(path)
    if jinja:
        (directory / "chat_template.jinja").write_text(jinja)
    if config:
        values = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").unlink()
        (directory / "tokenizer_config.json").write_text(json.dumps({**values, "chat_template": config}))
    return str(directory)


class TokenizerFetcher:
    """Fetches a model's tokenizer the way the coordinator does, from a server with nothing but ModelService."""

    def __init__(self, model: LoadedModel) -> None:
        worker: Deferred[Worker] = Deferred("the model")
        worker.set(cast(Worker, SimpleNamespace(model=model)))
        self._service = ModelService(worker)

    async def responses(self) -> list[Any]:
        stream = self._service.GetTokenizer(cast(Any, None), cast(Any, None))
        return [response async for response in cast(AsyncIterator[Any], stream)]

    async def fetch(self, model_name: str) -> Tokenizer:
        async def ignore(*_: object) -> None:
            pass

        server = grpc.aio.server()
        model_pb2_grpc.add_ModelServiceServicer_to_server(self._service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        link = WorkerLink[None](
            "draft", f"127.0.0.1:{port}", open_stream=lambda *_: None, accept=ignore, on_change=ignore
        )
        try:
            return await link.fetch_tokenizer(model_name)
        finally:
            await link.close()
            await server.stop(None)


NAMED = [{"name": "tool_use", "template": LLAMA}, {"name": "default", "template": CHATML}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"jinja": CHATML}, CHATML),
        ({"config": CHATML}, CHATML),
        ({"config": NAMED}, CHATML),
        ({"config": NAMED[:1]}, ""),
        ({}, ""),
    ],
    ids=["chat_template.jinja", "tokenizer_config.json", "by name", "none for chats", "none"],
)
async def test_a_worker_sends_its_model_s_template(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    model = load(directory_with(tmp_path / "model", **files), blas="")
    fetcher = TokenizerFetcher(model)
    (response,) = await fetcher.responses()
    assert response.config.chat_template == expected
    assert dict(response.config.special_tokens) == SPECIAL_TOKENS
    assert response.chunk == model.tokenizer_json

    tokenizer = await fetcher.fetch("tiny")
    chat = Chat((SYSTEM, QUESTION), tools=(TOOL,))
    if expected:
        text = template(expected).render(chat)
        assert tokenizer.encode_chat(chat) == tokenizer.encode(text, add_special_tokens=False)
    else:
        with pytest.raises(InvalidRequestError, match="the model tiny has no chat template"):
            tokenizer.encode_chat(chat)


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, 3 * 2**20])
async def test_the_config_comes_with_the_first_chunk_only(size: int) -> None:
    model = SimpleNamespace(tokenizer_json=b"x" * size, tokenizer_config=TokenizerConfig(CHATML, SPECIAL_TOKENS))
    first, *others = await TokenizerFetcher(cast(LoadedModel, model)).responses()
    assert (first.config.chat_template, dict(first.config.special_tokens)) == (CHATML, SPECIAL_TOKENS)
    assert not any(response.HasField("config") for response in others)
    chunks = [response.chunk for response in (first, *others)]
    assert b"".join(chunks) == model.tokenizer_json
    assert all(0 < len(chunk) <= 2**20 for chunk in chunks) or size == 0


async def test_special_tokens_reach_the_template_over_the_wire() -> None:
    config = TokenizerConfig(LLAMA, {"bos_token": "<|pad|>"})
    model = SimpleNamespace(tokenizer_json=TOKENIZER_FILE.read_bytes(), tokenizer_config=config)
    tokenizer = await TokenizerFetcher(cast(LoadedModel, model)).fetch("tiny")
    ids = tokenizer.encode_chat(Chat((QUESTION,)))
    assert tokenizer.decode(ids[:1], skip_special_tokens=False) == "<|pad|>"
