"""Tokens of texts and conversations, and their text, over HTTP, gRPC and the Python client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from specd import AsyncClient
from specd.errors import InvalidRequestError
from specd.settings import EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.text.tokenizer import Tokenizer
from tests.gateway.http_client import HttpClient

TEXT = "def area(r):\n    return 3.14 * r  # in cm²\n"
WHOLE = f"<|endoftext|>{TEXT}"
TOKENIZER = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes())


async def asked(http: HttpClient, path: str, **body: Any) -> Any:
    response = await http.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_tokens_of_a_text_are_those_of_its_prompt(http: HttpClient) -> None:
    tokenized = await asked(http, "/tokenize", prompt=TEXT)
    completion = await asked(http, "/v1/completions", prompt=TEXT, max_tokens=1)
    assert tokenized["count"] == len(tokenized["tokens"]) == completion["usage"]["prompt_tokens"]
    greedy = {"max_tokens": 4, "temperature": 0}
    same = await asked(http, "/v1/completions", prompt=tokenized["tokens"], **greedy)
    assert same["choices"] == (await asked(http, "/v1/completions", prompt=TEXT, **greedy))["choices"]
    texts = await asked(http, "/detokenize", tokens=tokenized["tokens"])
    assert texts == {"prompt": WHOLE, "content": WHOLE}
    assert await asked(http, "/tokenize", prompt="") == {**tokenized, "count": 0, "tokens": []}


async def test_a_conversation_has_the_tokens_of_its_template(arranged_http: HttpClient) -> None:
    messages = [{"role": "user", "content": "hello"}]
    tokenized = await asked(arranged_http, "/tokenize", messages=messages)
    answered = await asked(arranged_http, "/v1/chat/completions", messages=messages)
    assert tokenized["count"] == answered["usage"]["prompt_tokens"]
    assert "hello" in (await asked(arranged_http, "/detokenize", tokens=tokenized["tokens"]))["content"]


async def test_special_tokens_are_added_as_each_server_does(http: HttpClient) -> None:
    """This model's tokenizer begins each text with one."""
    bare = TOKENIZER.encode(TEXT, add_special_tokens=False)
    for body, expected in (
        ({"prompt": TEXT}, [0, *bare]),
        ({"prompt": TEXT, "add_special_tokens": False}, bare),
        ({"content": TEXT}, bare),
        ({"content": TEXT, "add_special": True}, [0, *bare]),
    ):
        assert (await asked(http, "/tokenize", **body))["tokens"] == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "content"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x " * 100_000}, None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [8192]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 5000}, "tokens"),
    ],
)
async def test_what_cannot_be_tokens_is_refused(http: HttpClient, path: str, body: Any, param: str | None) -> None:
    response = await http.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_the_python_client_does_the_same(stack: Stack) -> None:
    async with AsyncClient(stack.address) as client:
        token_ids = await client.tokenize(TEXT)
        assert await client.detokenize(token_ids) == WHOLE
        assert (await client.count_tokens(TEXT)).prompt_tokens == len(token_ids)
        with pytest.raises(InvalidRequestError, match="vocabulary") as refused:
            await client.detokenize([8192])
        assert refused.value.metadata["field"] == "token_ids"


async def test_embeddings_are_refused_with_a_sentence(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="specd has no embeddings"):
        await openai.embeddings.create(model="x", input="y")
