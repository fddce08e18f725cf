# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["litellm==1.110.2"]
# ///
"""LiteLLM against a gateway with a model that follows scripts: `uv run litellm_client.py URL`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # it would fetch a list of prices
import litellm

HELLO = "Hello! How can I help you today?"
SUNNY = "It is sunny in Zürich: 21 °C."
SERVER: dict[str, Any] = {"api_base": sys.argv[1], "api_key": "none", "max_retries": 0}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


def chat(messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(model="openai/arranged", messages=messages, temperature=0, **SERVER, **fields)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def refusal(kind: type[Exception], **fields: Any) -> Exception:
    try:
        litellm.completion(**{"model": "openai/arranged", "messages": user("hello"), **SERVER, **fields})
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


whole = chat(user("hello"), logprobs=True, top_logprobs=1)
assert whole.choices[0].message.content == HELLO
assert "".join(token.token for token in whole.choices[0].logprobs.content) == f"{HELLO}<|end|>"
assert whole.usage.completion_tokens > 5

chunks = list(chat(user("hello"), stream=True, stream_options={"include_usage": True}))
assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == HELLO
rebuilt: Any = litellm.stream_chunk_builder(chunks)
assert rebuilt.choices[0].message.content == HELLO
assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens

messages = user("ponder")
asked = chat(messages, tools=TOOLS).choices[0].message
assert asked.reasoning_content == "I need the weather.\n"
(call,) = asked.tool_calls
assert json.loads(call.function.arguments) == {"city": "Zürich", "days": 3}
messages += [asked.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
assert chat(messages, tools=TOOLS).choices[0].message.content == SUNNY
streamed: Any = litellm.stream_chunk_builder(list(chat(user("weather"), tools=TOOLS, stream=True)))
assert json.loads(streamed.choices[0].message.tool_calls[0].function.arguments) == {"city": "Zürich", "days": 3}

text: Any = litellm.text_completion(
    model="text-completion-openai/arranged", prompt="<|say:hello|>", temperature=0, max_tokens=64, **SERVER
)
assert text.choices[0].text == HELLO

response: Any = litellm.responses(model="openai/arranged", input="hello", temperature=0, **SERVER)
assert response.output[0].content[0].text == HELLO

assert "top_p" in str(refusal(litellm.BadRequestError, top_p=7))
assert "another" in str(refusal(litellm.NotFoundError, model="openai/another"))
refusal(litellm.ContextWindowExceededError, messages=user("hello " * 60) * 20)
print("LiteLLM is served")
