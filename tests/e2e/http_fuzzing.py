"""Random and mutated requests to the gateway, for tests.e2e.fuzzing."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from tests.e2e.fuzz_requests import PROMPT, RequestGenerator

# 5xx are not among them: nothing is away, and no request makes the gateway fail.
EXPECTED_STATUSES = {200, 400, 403, 404, 405, 409, 413, 415, 429}
POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize"),
)
GETS = ("/v1/models", "/v1/models/nosuch", "/health", "/metrics", "/openapi.json", "/")
_IMPATIENT = ("/health", "/v1/models", "/v1/models/nosuch")  # they soon give up a coordinator that is busy
_ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**63,
    0.5,
    1e308,
    "",
    "x",
    "\0\ud7ff",
    "x" * 20_000,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
]


async def send(client: httpx2.AsyncClient, generator: RequestGenerator) -> str:
    """Send a request, and return what came of it: method, path and status, or LEFT."""
    chance, pick = generator.random.random, generator.random.choice
    method, path = pick([("POST", path) for path in POSTS] * 4 + [("GET", path) for path in GETS])
    if chance() < 0.01:
        method = pick(["PUT", "DELETE", "OPTIONS", "HEAD", "POST", "GET"])
    headers = {"content-type": pick(["application/json"] * 20 + ["text/plain", "application/x-www-form-urlencoded"])}
    if chance() < 0.02:
        headers |= pick([{"host": "elsewhere.example.org"}, {"origin": "https://elsewhere.example.org"}])
    if chance() < 0.1:
        headers["x-specd-refuse-unloaded"] = pick(["1", "0", "x"])
    content = _body(path, generator) if method == "POST" else b""
    async with client.stream(method, path, content=content, headers=headers) as response:
        if chance() < 0.1:
            return f"{method} {path} LEFT"  # in the middle of a reply
        text = (await response.aread()).decode()
    if response.status_code >= 400 and method != "HEAD" and response.status_code not in {403, 404, 405}:
        assert json.loads(text)["error"]["message"], text
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        assert "server_error" not in text, text  # a stream that has begun with 200 has no other place for it
        assert "response.failed" not in text, text
        assert "event: error" not in text, text
    if path in _IMPATIENT and response.status_code in {503, 504}:
        return f"{method} {path} LATE"
    return f"{method} {path} {response.status_code}"


def _body(path: str, generator: RequestGenerator) -> bytes:
    kind = generator.random.random()
    if kind < 0.1:
        return generator.some_bytes()
    body = _valid_body(path, generator)
    if kind < 0.5:
        for _ in range(generator.random.choice([1, 1, 2, 4])):
            _spoil(body, generator)
    content = json.dumps(body).encode()
    return generator.mutated(content) if kind > 0.8 else content


def _valid_body(path: str, generator: RequestGenerator) -> dict[str, Any]:
    pick, upto = generator.random.choice, generator.random.randrange
    body: dict[str, Any] = {"model": "", "temperature": pick([0, 0.7, 2]), "stream": pick([False, True])}
    body["refuse_unloaded"] = pick([None, False, True])
    optional: dict[str, Any] = {
        "seed": upto(2**31),
        "top_p": pick([0.5, 1]),
        "num_draft_tokens": upto(8),
        "session_id": generator.session_id(),
        "user": "x",
        "unknown": [1],
    }
    if path == "/v1/responses":
        body |= {"input": pick([PROMPT, [{"role": "user", "content": PROMPT}]]), "max_output_tokens": 16}
    elif path.startswith("/v1/messages"):
        content: Any = pick([PROMPT, [{"type": "text", "text": PROMPT}]])
        body |= {"messages": [{"role": "user", "content": content}], "max_tokens": 1 + upto(4)}
        optional |= {"system": PROMPT, "stop_sequences": ["\n"], "thinking": {"type": "adaptive"}}
    elif path == "/v1/completions":
        body |= {"prompt": pick([PROMPT, [PROMPT, "x"], [1, 2, 3]]), "max_tokens": 1 + upto(4)}
        optional |= {"n": 1 + upto(3), "stop": "\n", "logprobs": upto(5), "echo": True, "logit_bias": {"5": -100}}
    else:
        body |= {"messages": [{"role": pick(["system", "user"]), "content": PROMPT}], "max_tokens": 1 + upto(4)}
        optional |= {"n": 1 + upto(3), "stop": ["\n"], "logprobs": True, "prediction": {"content": PROMPT}}
    return body | {name: value for name, value in optional.items() if upto(4) == 0}


def _spoil(body: dict[str, Any], generator: RequestGenerator) -> None:
    name = generator.random.choice([*body, "tools", "response_format", "stream_options", "reasoning", "system"])
    if generator.random.random() < 0.3:
        body.pop(name, None)
    else:
        body[name] = generator.random.choice(_ODD)
