"""POST /v1/completions in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.calls import responses_to
from tests.gateway.http_client import HttpClient
from tests.raw_client import RawClient

PATH = "/v1/completions"
PROMPT = "def area(r):"
SAMPLED: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.8, "seed": 11, "max_tokens": 20, "ignore_eos": True}


async def test_the_tokens_are_those_of_grpc(grpc_client: RawClient, http: HttpClient, openai: AsyncOpenAI) -> None:
    call = grpc_client.generate(PROMPT, sampling=SamplingParameters(temperature=0.8, seed=11), max_tokens=20)
    responses = await responses_to(call)
    text = "".join(response.text for response in responses)
    fields: Any = {name: value for name, value in SAMPLED.items() if name != "ignore_eos"}
    completion = await openai.completions.create(model="pycode", **fields)
    assert completion.choices[0].text == text
    streamed = ""
    async for chunk in await openai.completions.create(model="pycode", stream=True, **fields):
        streamed += chunk.choices[0].text
    assert streamed == text


async def test_prompts_and_choices_have_an_index_each(http: HttpClient) -> None:
    body = {**SAMPLED, "prompt": [PROMPT, "class Stack:"], "n": 2, "echo": True}
    whole = (await http.post(PATH, body)).json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [text.startswith(PROMPT) for text in texts] == [True, True, False, False]
    assert whole["usage"]["completion_tokens"] == 80
    alone = (await http.post(PATH, {**SAMPLED, "echo": True})).json()
    assert alone["choices"][0]["text"] == texts[0]
    chunks = await http.chunks(PATH, body)
    streamed = dict.fromkeys(range(4), "")
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(streamed.values()) == texts


async def test_token_ids_are_a_prompt(grpc_client: RawClient, http: HttpClient) -> None:
    ids = [300, 301, 302, 303]
    responses = await responses_to(grpc_client.generate(ids, max_tokens=8))
    text = "".join(response.text for response in responses)
    body = {"prompt": ids, "temperature": 0, "max_tokens": 8}
    assert (await http.post(PATH, body)).json()["choices"][0]["text"] == text
    two = (await http.post(PATH, {**body, "prompt": [ids, ids]})).json()
    assert [choice["text"] for choice in two["choices"]] == [text, text]


async def test_log_probabilities_have_their_places(http: HttpClient) -> None:
    body = {**SAMPLED, "logprobs": 2}
    choice = (await http.post(PATH, body)).json()["choices"][0]
    values = choice["logprobs"]
    assert "".join(values["tokens"]) == choice["text"]
    assert len(values["token_logprobs"]) == len(values["top_logprobs"]) == len(values["text_offset"]) == 20
    for token, offset in zip(values["tokens"], values["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    chunks = await http.chunks(PATH, body)
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == values["text_offset"]


# The pieces of two characters, and the end token, by their ids.
PIECES = {160: b"\xe2", 248: b"\x98", 227: b"\x83", 129: b"\xc3", 104: b"\xa9", 0: b"<|endoftext|>"}


@pytest.mark.parametrize("chat", [False, True])
async def test_a_token_that_is_no_text_has_its_own_name_and_bytes(http: HttpClient, chat: bool) -> None:
    body: dict[str, Any] = {"seed": 3, "max_tokens": 40, "ignore_eos": True, "token_sources": True}
    body |= {"temperature": 5, "logit_bias": {**dict.fromkeys(map(str, PIECES), 100), "0": 90}}
    if chat:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}
    else:
        body |= {"prompt": "x", "logprobs": 5}
    choice = (await http.post("/v1/chat/completions" if chat else PATH, body)).json()["choices"][0]
    own = [PIECES[token["id"]] for token in choice["tokens"]]
    if chat:
        entries = choice["logprobs"]["content"]
        assert [bytes(entry["bytes"]) for entry in entries] == own
        named = [entry["token"] for entry in entries]
    else:
        named = [name.removeprefix("bytes:") for name in choice["logprobs"]["tokens"]]
        for name, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
            assert len(top) in {5, 6}
            assert name in top
    assert named == [name.decode() if name.isascii() else f"\\x{name[0]:x}" for name in own]
    assert len(set(named)) > 2


@pytest.mark.parametrize("prompt", [PROMPT, [300, 301, 302, 303]])
async def test_an_echo_has_the_log_probabilities_of_the_prompt(
    http: HttpClient, grpc_client: RawClient, prompt: str | list[int]
) -> None:
    body = {**SAMPLED, "prompt": prompt, "echo": True, "logprobs": 2}
    choice = (await http.post(PATH, body)).json()["choices"][0]
    sampling = SamplingParameters(temperature=0.8, seed=11)
    first, *_ = await responses_to(
        grpc_client.generate(prompt, sampling=sampling, max_tokens=1, echo=True, top_log_probabilities=2)
    )
    echoed, values = first.prompt_tokens, choice["logprobs"]
    assert choice["text"].startswith(prompt if isinstance(prompt, str) else "".join(token.text for token in echoed))
    begin, text = "<|endoftext|>" if isinstance(prompt, str) else "", "".join(values["tokens"])
    assert text == begin + choice["text"]
    assert len(values["tokens"]) == len(values["token_logprobs"]) == len(echoed) + 20
    assert values["token_logprobs"][0] is values["top_logprobs"][0] is None
    expected = [token.log_probabilities.model for token in echoed[1:]]
    assert values["token_logprobs"][1 : len(echoed)] == pytest.approx(expected, abs=1e-3)
    ids = [{token.id, *(top.id for top in token.log_probabilities.top_model)} for token in echoed[1:]]
    assert [len(top) for top in values["top_logprobs"][1 : len(echoed)]] == list(map(len, ids))
    chunks = await http.chunks(PATH, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == values["text_offset"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_cannot_be_kept_is_refused(http: HttpClient, change: dict[str, Any], param: str) -> None:
    response = await http.post(PATH, {**SAMPLED, **change})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_says_who_said_a_token_and_what_rounds_proposed(http: HttpClient, chat: bool) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    body = {**prompt, "temperature": 0, "max_tokens": 48, "ignore_eos": True, "token_sources": True}
    body["num_draft_tokens"] = 4
    chunks = await http.chunks("/v1/chat/completions" if chat else PATH, body)
    choices = [chunk["choices"][0] for chunk in chunks if "tokens" in chunk["choices"][0]]
    sources = [token["source"] for choice in choices for token in choice["tokens"]]
    timings = chunks[-1]["timings"]
    assert len(sources) == 48
    assert sum(choice["round"]["proposed"] for choice in choices) == timings["draft_n"] > 0
    assert sum(choice["round"]["accepted"] for choice in choices) == timings["draft_n_accepted"]
    assert timings["draft_n_accepted"] == 48 - sources.count("target")
    assert len(choices) == timings["rounds"]
