"""The text of tool calls, by model, in enough detail to make a model write one.

In a text, `$name` stands for the tool's name, `$arguments` for its arguments, `$key` for an argument's name, `$number`
for a number, and `$line` for a line break that can be left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tags:
    """Arguments between markers, one after another. A string stands as it is, anything else is JSON.

    `before_string` begins a string, if that is another marker.
    """

    before: str
    after: str
    before_string: str = ""


@dataclass(frozen=True)
class Keywords:
    """Arguments as Python's keywords, `key=value`, with values in JSON."""


@dataclass(frozen=True)
class Braces:
    """An object with bare keys, at any depth. `quote` stands before and after each string."""

    quote: str


@dataclass(frozen=True)
class CallSyntax:
    """The text of calls: `start`, one `call` or several with `between` in between, `end`.

    Without `between`, a reply has one call. Without `arguments`, these are a JSON object.
    """

    call: str
    start: str = ""
    end: str = ""
    between: str | None = ""
    arguments: Tags | Keywords | Braces | None = None


@dataclass(frozen=True)
class ReplySyntax:
    """The text of whole replies: thoughts if there are any, then calls or an answer.

    Calls in a text begin with `trigger`; without it, nothing sets them apart. If they are `last`, a reply ends with
    them. `thought` are the texts around a thought,
    if the reply begins with thoughts in any number; `answer` is the text before an answer.
    """

    calls: tuple[CallSyntax, ...] = ()
    trigger: str = ""
    last: bool = False
    thought: tuple[str, str] | None = None
    answer: str = ""


UNKNOWN = ReplySyntax()

_OBJECT = '{"name": "$name", "arguments": $arguments}'


def in_list(start: str, end: str = "", call: str = _OBJECT) -> CallSyntax:
    """Return the syntax of a JSON list of calls between two markers."""
    return CallSyntax(call, f"{start}[", f"]{end}", ", ")


def in_functions(start: str, end: str) -> CallSyntax:
    """Return the syntax of Qwen3-Coder, between markers of this text."""
    return CallSyntax(
        f"{start}\n<function=$name>\n$arguments</function>\n{end}",
        between="$line",
        arguments=Tags("<parameter=$key>\n", "\n</parameter>\n"),
    )


MINIMAX = CallSyntax(
    '<invoke name="$name">\n$arguments</invoke>\n',
    "<minimax:tool_call>\n",
    "</minimax:tool_call>",
    arguments=Tags('<parameter name="$key">', "</parameter>\n"),
)


def dsml(block: str) -> CallSyntax:
    """Return the syntax of DeepSeek V3.2 and later, in a block of this name."""
    return CallSyntax(
        '<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>\n',
        f"<｜DSML｜{block}>\n",
        f"</｜DSML｜{block}>",
        arguments=Tags(
            '<｜DSML｜parameter name="$key" string="false">',
            "</｜DSML｜parameter>\n",
            '<｜DSML｜parameter name="$key" string="true">',
        ),
    )


OBJECT_IN_TAGS = CallSyntax(f"<tool_call>\n{_OBJECT}\n</tool_call>", between="$line")
LLAMA = CallSyntax('{"name": "$name", "parameters": $arguments}', between="; ")
MISTRAL = CallSyntax("[TOOL_CALLS]$name[ARGS]$arguments")
MISTRAL_LIST = in_list("[TOOL_CALLS]")
COHERE = in_list(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    '\n    {"tool_call_id": "$number", "tool_name": "$name", "parameters": $arguments}\n',
)
KIMI = CallSyntax(
    "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
DEEPSEEK = CallSyntax(
    "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK_BLOCKS = CallSyntax(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "\n",
)
GLM = CallSyntax(
    "<tool_call>$name$line$arguments</tool_call>",
    between="$line",
    arguments=Tags("<arg_key>$key</arg_key>$line<arg_value>", "</arg_value>$line"),
)
LONGCAT = CallSyntax(
    "<longcat_tool_call>$name\n$arguments</longcat_tool_call>",
    between="$line",
    arguments=Tags(
        "<longcat_arg_key>$key</longcat_arg_key>\n<longcat_arg_value>",
        "</longcat_arg_value>\n",
    ),
)
HUNYUAN = CallSyntax(
    "<tool_call:opensource>$name<tool_sep:opensource>\n$arguments</tool_call:opensource>\n",
    "<tool_calls:opensource>\n",
    "</tool_calls:opensource>",
    arguments=Tags(
        "<arg_key:opensource>$key</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>\n"
    ),
)
SOLAR = CallSyntax(
    "<|tool_call:begin|>$number<|tool_call:name|>$name<|tool_call:args|>$arguments<|tool_call:end|>",
    "<|begin|>assistant<|tool_calls|>",
    "<|calls|>",
)
APERTUS = in_list("<|tools_prefix|>", "<|tools_suffix|>", '{"$name": $arguments}')
FUNCTIONARY = CallSyntax("<function=$name>$arguments</function>")
MINICPM = CallSyntax(
    '<function name="$name">$arguments</function>',
    between="$line",
    arguments=Tags('<param name="$key">', "</param>"),
)
GIGACHAT = CallSyntax(f"<|function_call|>{_OBJECT}", between=None)
GEMMA = CallSyntax("<|tool_call>call:$name$arguments<tool_call|>", arguments=Braces('<|"|>'))
PYTHON = CallSyntax("$name($arguments)", "<|tool_call_start|>[", "]<|tool_call_end|>", ", ", Keywords())
PYTHON_LINES = CallSyntax("$name($arguments)", "<function_calls>\n", "\n</function_calls>", "\n", Keywords())
HARMONY = ReplySyntax(
    (
        CallSyntax(
            "<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
            between=None,
        ),
    ),
    thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    answer="<|channel|>final<|message|>",
)
