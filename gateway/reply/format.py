"""In which form a model writes its reasoning and its tool calls, as its chat template shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.reply.tool_parsers import ToolParser, load_parser

# The first that fits counts. The choice is that of mlx-lm, `tokenizer_utils._infer_tool_parser` and `_infer_thinking`,
# with what a template and the special tokens can tell.
_PARSERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "function_gemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<tool_call>\\n<function=",), "qwen3_coder"),
    (("<tool_call>\n<function=",), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
    (("<tool_call>", "tool_call.name"), "json_tools"),
)
_PARSERS_BY_TOKENS = (
    (("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "kimi_k3"),
    (("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
)
_REASONING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)


@dataclass(frozen=True)
class Markers:
    """What stands before and after the reasoning of a reply."""

    start: str
    end: str


@dataclass(frozen=True)
class ReplyFormat:
    """The form of a model's replies; None for what it does not do, or not in a form that is known."""

    reasoning: Markers | None = None
    tools: ToolParser | None = None

    def begins_in_reasoning(self, prompt_end: str) -> bool:
        """Say whether a prompt that ends like this has begun the reasoning already, as some templates do."""
        return self.reasoning is not None and prompt_end.rstrip().endswith(self.reasoning.start)


def detect_format(chat_template: str, special_tokens: Mapping[int, str]) -> ReplyFormat:
    """Return the form of the replies of the model with this template and these special tokens."""
    tokens = set(special_tokens.values())
    reasoning = next(
        (Markers(start, end) for start, end in _REASONING if end in chat_template or {start, end} <= tokens),
        None,
    )
    name = next(
        (name for texts, name in _PARSERS if all(text in chat_template for text in texts)),
        next((name for texts, name in _PARSERS_BY_TOKENS if tokens.issuperset(texts)), ""),
    )
    return ReplyFormat(reasoning, load_parser(name) if name else None)
