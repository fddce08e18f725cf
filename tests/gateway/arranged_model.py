"""A tiny model that follows scripts, token after token; its chat template selects the script."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import AddedToken, PreTrainedTokenizerFast

from specd.settings import EMBEDDED_TARGET
from tests.worker.models import write_model

_HIDDEN_SIZE = 256
_CONTEXT_LENGTH = 4096
_PIECE_CHARACTERS = 3
_END = "<|end|>"
# Before each piece of a script stands its place, which the decoder takes away: two pieces with the same text are two
# tokens, so that a token alone tells which one follows.
_PLACE_BEGIN, _PLACE_END = "\ue000", "\ue001"

WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
WRITTEN = 'print("written by an agent")\n'
_WRITE = {"name": "write", "arguments": {"filePath": "written.py", "content": WRITTEN}}  # as opencode's tool has it
RUN_BY_CODEX = "run by an agent\n"
_EXECUTE = {"name": "exec_command", "arguments": {"cmd": f"echo {RUN_BY_CODEX.strip()} > written.txt"}}
TIME_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'

SCRIPTS = {
    "hello": "Hello! How can I help you today?",
    "think": "<think>\nThe user greets.\n</think>\n\nGood day to you.",
    "weather": f"Let me look.\n{WEATHER_CALL}",
    "both": f"{WEATHER_CALL}\n{TIME_CALL}",
    "ponder": f"<think>\nI need the weather.\n</think>\n\n{WEATHER_CALL}",
    "unending": f"<think>\nI need the weather.\n{WEATHER_CALL}",
    "broken": '<tool_call>\n{"name": "get_weather", "arguments": {"city"\n</tool_call>',
    "write": f"<tool_call>\n{json.dumps(_WRITE)}\n</tool_call>",
    "execute": f"<tool_call>\n{json.dumps(_EXECUTE)}\n</tool_call>",
    "markup": "<b>bold</b><img src=x onerror=\"document.title='broken'\">",
    "markdown": (
        "## Sums\n\nUse `sum` or **a loop**; see [the docs](https://example.org/sum) and [this](javascript:alert(1)).\n"
        "\n1. first\n   - inner\n2. second\n\n| name | n |\n|---|---|\n| a_b_c | 1 |\n\n"
        "```python\ndef add(a, b):\n    return a + b  # <b>\n```\n\n![x](https://example.org/x.png)"
    ),
    "count": " ".join(map(str, range(1000))),
    "sunny": "It is sunny in Zürich: 21 °C.",
}

# The last message selects the script: by its first word, or as the result of a tool; other words say hello. Of what is
# long, such as the instructions of agents, the end is enough. `<tool_call>` and `tool_call.name` tell, as in Qwen's
# template, in which form tools are called.
CHAT_TEMPLATE = (
    f"{{%- set scripts = {list(SCRIPTS)} %}}"
    + """\
{%- if tools %}{{ 'Tools: ' + (tools | tojson)[-500:] + '\\n' }}{% endif %}
{%- for message in messages %}
    {{- message.role + ': ' + message.content.split('</think>')[-1][-500:] }}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
        {{- '<tool_call>' + tool_call.name + (tool_call.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- set script = 'sunny' if messages[-1].role == 'tool' else messages[-1].content.split(' ')[0] %}
{%- if enable_thinking %}{{ '<think>\\n' }}{% set script = 'think' %}{% endif %}
{{- '<|say:' + (script if script in scripts else 'hello') + '|>' }}
"""
)


def save_arranged_model(directory: Path) -> str:
    """Save the model, and return its path."""
    successors: dict[str, str] = {}
    vocabulary = ["<unk>", _END, *string.printable, *"üé°"]
    for name, text in SCRIPTS.items():
        last = f"<|say:{name}|>"
        vocabulary.append(last)
        for piece in _pieces(name, text):
            vocabulary.append(piece)
            successors[last] = last = piece
        successors[last] = _END
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}

    write_model(directory, _config(len(ids)), _weights(ids, successors), tokenizer_of=EMBEDDED_TARGET)
    _tokenizer(ids).save_pretrained(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[_END]}))
    return str(directory)


def _pieces(name: str, text: str) -> list[str]:
    starts = range(0, len(text), _PIECE_CHARACTERS)
    return [f"{_PLACE_BEGIN}{name}{i}{_PLACE_END}{text[i : i + _PIECE_CHARACTERS]}" for i in starts]


def _tokenizer(ids: Mapping[str, int]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab=dict(ids), merges=[], unk_token="<unk>"))
    place = Regex(f"{_PLACE_BEGIN}[^{_PLACE_END}]*{_PLACE_END}")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(place, "")])
    tokenizer.add_special_tokens([AddedToken(token) for token in ids if token.startswith("<|")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, unk_token="<unk>")


def _config(vocabulary_size: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": _HIDDEN_SIZE,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary_size,
        "max_position_embeddings": _CONTEXT_LENGTH,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }


def _weights(ids: Mapping[str, int], successors: Mapping[str, str]) -> dict[str, mx.array]:
    """Return weights whose attention and MLP add nothing, so that a token alone decides which one follows."""
    mx.random.seed(0)
    embeddings = mx.where(mx.random.bernoulli(0.5, (len(ids), _HIDDEN_SIZE)), 1.0, -1.0)
    before, after = (mx.array([ids[token] for token in side]) for side in (successors, successors.values()))
    output = mx.zeros((len(ids), _HIDDEN_SIZE)).at[after].add(embeddings[before])
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": output,
        "model.norm.weight": mx.ones(_HIDDEN_SIZE),
        f"{layer}input_layernorm.weight": mx.ones(_HIDDEN_SIZE),
        f"{layer}post_attention_layernorm.weight": mx.ones(_HIDDEN_SIZE),
        **{f"{layer}self_attn.{name}_proj.weight": mx.ones((32, _HIDDEN_SIZE)) for name in "qkv"},
        f"{layer}self_attn.o_proj.weight": mx.zeros((_HIDDEN_SIZE, 32)),
        f"{layer}mlp.gate_proj.weight": mx.zeros((16, _HIDDEN_SIZE)),
        f"{layer}mlp.up_proj.weight": mx.zeros((16, _HIDDEN_SIZE)),
        f"{layer}mlp.down_proj.weight": mx.zeros((_HIDDEN_SIZE, 16)),
    }
