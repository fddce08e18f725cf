"""Replies in all forms that are read, written by their documentation: templates' ends, markers and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
Calls = Sequence[tuple[str, Arguments]]

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "size": {"type": "integer"}},
            },
        },
    }
    for name in ("write", "get_time")
)
_MARK = "\x01"  # around what can be a special token


def special(token: str) -> str:
    """Return a marker that models have as a special token."""
    return f"{_MARK}{token}{_MARK}"


def pieces(reply: str) -> list[tuple[str, bool]]:
    """Return the pieces of a reply, and whether each is a special token."""
    return [(piece, i % 2 == 1) for i, piece in enumerate(reply.split(_MARK)) if piece]


@dataclass(frozen=True)
class Form:
    """A form: what of its template shows it, how it writes, and `end`, which must not end a call within a string."""

    template: str
    write_reasoning: Callable[[str], str] | None
    write_calls: Callable[[Calls], str] | None
    write_content: Callable[[str], str] = lambda text: text
    end: str = ""
    prompt_end: str = ""
    max_calls: int = 3


def _between(start: str, end: str) -> Callable[[str], str]:
    return lambda text: f"{start}{text}{end}"


_THINK = _between("<think>", "</think>")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: Calls, name: str = "name", arguments: str = "arguments") -> list[dict[str, Any]]:
    return [{name: called, arguments: given} for called, given in calls]


def _each(write: Callable[[str, Arguments], str]) -> Callable[[Calls], str]:
    return lambda calls: "".join(write(name, arguments) for name, arguments in calls)


def _tags(arguments: Arguments, key: str, value: str, end: str) -> str:
    return "".join(
        f"{key.format(name)}{value}{given if isinstance(given, str) else _dumps(given)}{end}"
        for name, given in arguments.items()
    )


def _gemma(value: Any) -> str:
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else _dumps(value)


def _harmony_call(name: str, arguments: Arguments) -> str:
    header = f"{special('<|channel|>')}commentary to=functions.{name} {special('<|constrain|>')}json"
    return f"{special('<|start|>')}assistant{header}{special('<|message|>')}{_dumps(arguments)}{special('<|call|>')}"


def _message(header: str, text: str, end: str) -> str:
    return f"{special('<|start|>')}assistant{header}{special('<|message|>')}{text}{special(end)}"


def _dsml(block: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        invokes = "".join(
            f'<｜DSML｜invoke name="{name}">\n'
            + "".join(
                f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
                f"{value if isinstance(value, str) else _dumps(value)}</｜DSML｜parameter>\n"
                for key, value in arguments.items()
            )
            + "</｜DSML｜invoke>\n"
            for name, arguments in calls
        )
        return f"<｜DSML｜{block}>\n{invokes}</｜DSML｜{block}>"

    return write


def _deepseek(calls: Calls) -> str:
    said = "".join(
        f"{special('<｜tool▁call▁begin｜>')}{name}{special('<｜tool▁sep｜>')}{_dumps(arguments)}"
        f"{special('<｜tool▁call▁end｜>')}"
        for name, arguments in calls
    )
    return f"{special('<｜tool▁calls▁begin｜>')}{said}{special('<｜tool▁calls▁end｜>')}"


def _coder(start: str, end: str) -> Callable[[Calls], str]:
    return _each(
        lambda name, arguments: (
            f"{start}\n<function={name}>\n"
            + _tags(arguments, "<parameter={}>", "\n", "\n</parameter>\n")
            + f"</function>\n{end}"
        )
    )


def _kimi_k2(calls: Calls) -> str:
    said = "".join(
        f"{special('<|tool_call_begin|>')}functions.{name}:{i}{special('<|tool_call_argument_begin|>')}"
        f"{_dumps(arguments)}{special('<|tool_call_end|>')}"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"{special('<|tool_calls_section_begin|>')}{said}{special('<|tool_calls_section_end|>')}"


def _kimi_k3(calls: Calls) -> str:
    def tag(side: str, text: str) -> str:
        return f"{special(f'<|{side}|>')}{text}{special('<|sep|>')}"

    said = ""
    for name, arguments in calls:
        said += tag("open", f'call tool="{name}" index="1"')
        for key, value in arguments.items():
            kind = "string" if isinstance(value, str) else "number"
            said += tag("open", f'argument key="{key}" type="{kind}"')
            said += f"{value if isinstance(value, str) else _dumps(value)}{tag('close', 'argument')}"
        said += tag("close", "call")
    return f"{tag('open', 'tools')}{said}{tag('close', 'tools')}"


def _hunyuan(calls: Calls) -> str:
    said = "".join(
        f"<tool_call:opensource>{name}<tool_sep:opensource>\n"
        + _tags(
            arguments,
            "<arg_key:opensource>{}</arg_key:opensource>\n",
            "<arg_value:opensource>",
            "</arg_value:opensource>\n",
        )
        + "</tool_call:opensource>\n"
        for name, arguments in calls
    )
    return f"<tool_calls:opensource>\n{said}</tool_calls:opensource>"


def _invokes(prefix: str) -> Callable[[Calls], str]:
    return lambda calls: "".join(
        f'<{prefix}invoke name="{name}">\n'
        + _tags(arguments, f'<{prefix}parameter name="{{}}">', "", f"</{prefix}parameter>\n")
        + f"</{prefix}invoke>\n"
        for name, arguments in calls
    )


def _solar(calls: Calls) -> str:
    said = "".join(
        f"{special('<|tool_call:begin|>')}id{i}{special('<|tool_call:name|>')}{name}{special('<|tool_call:args|>')}"
        f"{_dumps(arguments)}{special('<|tool_call:end|>')}"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"{special('<|begin|>')}assistant{special('<|tool_calls|>')}{said}{special('<|calls|>')}"


def _python(calls: Calls) -> str:
    said = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return f"[{said}]"


def _lines(calls: Calls) -> str:
    return "\n".join(_python([call])[1:-1] for call in calls)


def _json_between(start: str, end: str) -> Callable[[Calls], str]:
    return lambda calls: f"{start}{_dumps(_objects(calls))}{end}"


FORMS = {
    "JSON in <tool_call>": Form(
        "<tool_call> tool_call.name </think>",
        _THINK,
        _each(lambda name, arguments: f"<tool_call>\n{_dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"),
        end="</tool_call>",
    ),
    "harmony": Form(
        "<|channel|> <|message|> <|start|>assistant",
        lambda text: _message(f"{special('<|channel|>')}analysis", text, "<|end|>"),
        _each(_harmony_call),
        lambda text: _message(f"{special('<|channel|>')}final", text, "<|end|>"),
        end="<|call|>",
        prompt_end="<|start|>assistant",
    ),
    "ATEM": Form(
        "<atem:function_calls> <|message|> to=self",
        lambda text: _message(" to=self", text, "<|eom|>"),
        lambda calls: _message(
            f" to={calls[0][0]}",
            f"<atem:function_calls>\n{_invokes('atem:')(calls)}</atem:function_calls>",
            "<|eom|>",
        ),
        lambda text: _message(" to=user", text, "<|eom|>"),
        prompt_end="<|start|>assistant",
    ),
    "Mistral": Form(
        "[TOOL_CALLS] [/THINK]",
        _between(special("[THINK]"), special("[/THINK]")),
        _each(lambda name, arguments: f"{special('[TOOL_CALLS]')}{name}{special('[ARGS]')}{_dumps(arguments)}"),
    ),
    "Mistral's list": Form("[TOOL_CALLS]", None, lambda calls: f"{special('[TOOL_CALLS]')}{_dumps(_objects(calls))}"),
    "Seed": Form(
        "<seed:tool_call> </seed:think>",
        _between("<seed:think>", "</seed:think>"),
        _coder("<seed:tool_call>", "</seed:tool_call>"),
        end="</seed:tool_call>",
    ),
    "Qwen3-Coder": Form("<tool_call>\n<function=", None, _coder("<tool_call>", "</tool_call>"), end="</tool_call>"),
    "Cohere": Form(
        "<|START_ACTION|> <|END_THINKING|>",
        _between(special("<|START_THINKING|>"), special("<|END_THINKING|>")),
        lambda calls: (
            f"{special('<|START_ACTION|>')}{_dumps(_objects(calls, 'tool_name', 'parameters'))}"
            f"{special('<|END_ACTION|>')}"
        ),
        _between(special("<|START_RESPONSE|>"), special("<|END_RESPONSE|>")),
        end="<|END_ACTION|>",
    ),
    "Llama": Form(
        "<|python_tag|>",
        None,
        lambda calls: "; ".join(map(_dumps, _objects(calls, arguments="parameters"))),
    ),
    "Llama, tagged": Form(
        "<|python_tag|>",
        None,
        lambda calls: special("<|python_tag|>") + "; ".join(map(_dumps, _objects(calls, arguments="parameters"))),
    ),
    "Llama's Python": Form("<|python_tag|>", None, _python),
    "LFM2": Form(
        "<|tool_call_start|> </think>",
        _THINK,
        lambda calls: f"{special('<|tool_call_start|>')}{_python(calls)}{special('<|tool_call_end|>')}",
        end="<|tool_call_end|>",
    ),
    "Olmo": Form(
        "<function_calls></function_calls> </think>",
        _THINK,
        lambda calls: f"<function_calls>\n{_lines(calls)}\n</function_calls>",
        end="</function_calls>",
    ),
    "DeepSeek V3.1": Form("<｜tool▁calls▁begin｜> </think>", _THINK, _deepseek, end="<｜tool▁calls▁end｜>"),
    "DeepSeek V3.2": Form(
        "｜DSML｜ function_calls> </think>", _THINK, _dsml("function_calls"), end="</｜DSML｜function_calls>"
    ),
    "DeepSeek V4": Form("｜DSML｜ tool_calls> </think>", _THINK, _dsml("tool_calls"), end="</｜DSML｜tool_calls>"),
    "Granite": Form(
        "<|tool_call|> <think></think> <response></response>",
        _THINK,
        _json_between(special("<|tool_call|>"), ""),
        _between("<response>", "</response>"),
    ),
    "Hunyuan": Form(
        "{%- set HYTK = ':opensource' %} <tool_calls{}> </think{}>",
        _between("<think:opensource>", "</think:opensource>"),
        _hunyuan,
        end="</tool_calls:opensource>",
    ),
    "Hunyuan A13B": Form(
        "<tool_calls> </think>",
        _THINK,
        _json_between("<tool_calls>", "</tool_calls>"),
        end="</tool_calls>",
    ),
    "Nemotron": Form("<TOOLCALL> </think>", _THINK, _json_between("<TOOLCALL>", "</TOOLCALL>"), end="</TOOLCALL>"),
    "GLM": Form(
        "<arg_key> </think>",
        _THINK,
        _each(
            lambda name, arguments: (
                f"<tool_call>{name}\n"
                + _tags(arguments, "<arg_key>{}</arg_key>\n", "<arg_value>", "</arg_value>\n")
                + "</tool_call>"
            )
        ),
        end="</tool_call>",
    ),
    "Kimi K2": Form("<|tool_calls_section_begin|> </think>", _THINK, _kimi_k2, end="<|tool_calls_section_end|>"),
    "Kimi K3": Form(
        "open_tag('think') open_tag('tools')",
        _between(f"{special('<|open|>')}think{special('<|sep|>')}", f"{special('<|close|>')}think{special('<|sep|>')}"),
        _kimi_k3,
        _between(
            f"{special('<|open|>')}response{special('<|sep|>')}",
            f"{special('<|close|>')}response{special('<|sep|>')}",
        ),
    ),
    "Gemma 4": Form(
        "<|tool_call> <tool_call|> <channel|>",
        _between(f"{special('<|channel>')}thought\n", special("<channel|>")),
        _each(
            lambda name, arguments: (
                f"{special('<|tool_call>')}call:{name}{{"
                f"{','.join(f'{key}:{_gemma(value)}' for key, value in arguments.items())}}}{special('<tool_call|>')}"
            )
        ),
        end="<tool_call|>",
    ),
    "MiniMax M2": Form(
        "<minimax:tool_call> </think>",
        _THINK,
        lambda calls: f"<minimax:tool_call>\n{_invokes('')(calls)}</minimax:tool_call>",
        end="</invoke></minimax:tool_call>",
    ),
    "MiniCPM5": Form(
        '<function name=" <param name=" </think>',
        _THINK,
        _each(
            lambda name, arguments: (
                f'<function name="{name}">' + _tags(arguments, '<param name="{}">', "", "</param>") + "</function>\n"
            )
        ),
        end="</function>",
    ),
    "Solar": Form(
        "assistant<|think|> <|tool_call:begin|>",
        _between(special("<|think|>"), special("<|end|>")),
        _solar,
        lambda text: f"{special('<|begin|>')}assistant{special('<|content|>')}{text}{special('<|end|>')}",
        end="<|calls|>",
    ),
    "Apertus": Form(
        "<|tools_prefix|> <|inner_suffix|>",
        _between(special("<|inner_prefix|>"), special("<|inner_suffix|>")),
        lambda calls: (
            f"{special('<|tools_prefix|>')}{_dumps([{name: arguments} for name, arguments in calls])}"
            f"{special('<|tools_suffix|>')}"
        ),
        end="<|tools_suffix|>",
    ),
    "Functionary": Form(
        "<function= </function>",
        None,
        _each(lambda name, arguments: f"<function={name}>{_dumps(arguments)}</function>"),
        end="</function>",
    ),
    "Firefunction": Form("functools[", None, _json_between("functools", "")),
    "GigaChat": Form(
        "<|function_call|>",
        None,
        lambda calls: f"{special('<|function_call|>')}{_dumps(_objects(calls)[0])}",
        max_calls=1,
    ),
    "Apriel": Form(
        "Here are my reasoning steps: [BEGIN FINAL RESPONSE]",
        _between("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]\n"),
        None,
    ),
    "MiniMax M3": Form(
        "]<]minimax[>[ <tool_call> tool_call.name </mm:think>", _between("<mm:think>", "</mm:think>"), None
    ),
}
