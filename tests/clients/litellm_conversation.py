# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["litellm==1.110.2"]
# ///
"""LiteLLM in a conversation: `uv run litellm_conversation.py URL MODEL TURN...` prints the replies as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # it would fetch a list of prices
import litellm

url, model, *turns = sys.argv[1:]
messages: list[Any] = []
for turn in turns:
    messages.append({"role": "user", "content": turn})
    asked: dict[str, Any] = {"api_base": url, "api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 24}
    chunks = litellm.completion(model=f"openai/{model}", messages=messages, stream=True, **asked)
    reply: Any = litellm.stream_chunk_builder(list(chunks))
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
print(json.dumps([message["content"] for message in messages[1::2]]))
