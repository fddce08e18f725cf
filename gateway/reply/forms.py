"""The forms of models' reasoning and tool calls, and the signs of each form in a template.

`families` are mlx-lm's, by their published models; a model is recognised by its own template and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.calls import syntax
from gateway.reply import own_parsers as own
from gateway.reply.cutter import Quotes
from gateway.reply.tool_parsers import JSON_STRINGS, PYTHON_STRINGS, ToolParser, load_parser


@dataclass(frozen=True)
class Markers:
    """The text before and after a section of a reply."""

    start: str
    end: str


@dataclass(frozen=True)
class ReasoningForm:
    """A form of reasoning. A template shows it by the text, otherwise by its end; the tokenizer by special `tokens`.

    `dropped` are markers around the content without a meaning.
    """

    markers: Markers
    families: tuple[str, ...] = ()
    text: str = ""
    tokens: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolForm:
    """A form of tool calls. A template shows it by all of one of the `texts`, the tokenizer by special `tokens`.

    A model can be made to write the `calls`.
    """

    name: str
    texts: tuple[tuple[str, ...], ...]
    load: Callable[[], ToolParser | None]
    families: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    calls: tuple[syntax.CallSyntax, ...] = ()


@dataclass(frozen=True)
class ChannelForm:
    """A form whose messages have headers with channels or recipients. A template shows it by all of the `texts`.

    The answer begins behind `answer_start`. Calls are JSON, or in the form of mlx-lm's parser of that name. A template
    that `refuses_both` does not accept both reasoning and content in a message with tool calls.
    """

    name: str
    texts: tuple[str, ...]
    answer_start: str
    families: tuple[str, ...]
    parser: str = ""
    refuses_both: bool = False
    reply: syntax.ReplySyntax = syntax.UNKNOWN

    def message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message as the template reads it."""
        if not (self.refuses_both and message["content"] and message.get("tool_calls")):
            return message
        return {name: value for name, value in message.items() if name != "reasoning_content"}


CHANNELS = (
    ChannelForm(
        "harmony",
        ("<|channel|>", "<|message|>", "<|start|>assistant"),
        "<|channel|>final",
        families=("gpt_oss",),
        refuses_both=True,
        reply=syntax.HARMONY,
    ),
    ChannelForm(
        "ATEM",
        ("<atem:function_calls>", "<|message|>", "to=self"),
        "to=user<|message|>",
        families=("muse_glimmer", "muse_spark"),
        parser="muse_spark",
    ),
)

# In each table, the first form that fits counts.
REASONING = (
    ReasoningForm(Markers("<longcat_think>", "</longcat_think>"), families=("longcat_flash", "longcat_flash_ngram")),
    ReasoningForm(Markers("<seed:think>", "</seed:think>"), families=("seed_oss",)),
    # A reply without reasoning begins with its end.
    ReasoningForm(Markers("<mm:think>", "</mm:think>"), families=("minimax_m3_vl",), dropped=("</mm:think>",)),
    ReasoningForm(Markers("<think:opensource>", "</think:opensource>"), text="</think{}>"),
    ReasoningForm(Markers("[THINK]", "[/THINK]"), families=("ministral3", "mistral3", "mistral4")),
    ReasoningForm(
        Markers("<|START_THINKING|>", "<|END_THINKING|>"),
        families=("cohere2",),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningForm(
        Markers("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        families=("kimi_k3",),
        text="open_tag('think'",
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ReasoningForm(
        Markers("<|channel>thought", "<channel|>"),
        families=("gemma4", "gemma4_text"),
        tokens=("<|channel>", "<channel|>"),
    ),
    ReasoningForm(Markers("<|inner_prefix|>", "<|inner_suffix|>"), families=("apertus",)),
    ReasoningForm(
        Markers("<|think|>", "<|end|>"),
        families=("solar_open",),
        text="assistant<|think|>",
        dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
    ReasoningForm(Markers("<|think:start|>", "<|think:end|>")),
    ReasoningForm(Markers("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), dropped=("[END FINAL RESPONSE]",)),
    ReasoningForm(
        Markers("<think>", "</think>"),
        families=(
            *("bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "deepseek_v3", "deepseek_v32"),
            *("deepseek_v41", "exaone4", "exaone_moe"),
            *("falcon_h1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granite", "hunyuan", "hunyuan_v1_dense"),
            *("kimi_k25", "laguna", "lfm2", "lfm2_moe", "llama", "mimo", "mimo_v2_flash", "minimax", "nemotron-nas"),
            *("nemotron_h", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
            *("qwen3_vl", "qwen3_vl_moe", "rwkv7", "smollm3", "spark2_5", "step3p5"),
        ),
    ),
)
# Wrappers of the content behind the reasoning, by the sign in the template.
WRAPPERS = {"<response></response>": Markers("<response>", "</response>")}  # Granite


def _mlx_lm(name: str, **markers: str) -> Callable[[], ToolParser | None]:
    return partial(load_parser, name, **markers)


def _own(
    parse: Callable[..., object], start: str, end: str = "", quotes: Quotes = JSON_STRINGS, bare: tuple[str, ...] = ()
) -> Callable[[], ToolParser]:
    return lambda: ToolParser(start, end, parse, quotes, bare)


def _unknown() -> None:
    """Load no parser: the form is listed so that it is not mistaken for another one."""


# The forms with a parser in mlx-lm, as `tokenizer_utils._infer_tool_parser` recognises them, and ours.
TOOLS = (
    ToolForm(
        "MiniMax M2",
        (("<minimax:tool_call>",),),
        _own(
            own.hiding("minimax_m2", "</invoke>", "parameter"),
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            {"<parameter name=": ("</parameter>",)},
        ),
        families=("minimax",),
        calls=(syntax.MINIMAX,),
    ),
    ToolForm("MiniMax M3", (("]<]minimax[>[",),), _unknown),
    ToolForm(
        "Gemma 4",
        (("<|tool_call>", "<tool_call|>"),),
        _own(own.parse_gemma, "<|tool_call>", "<tool_call|>", {'<|"|>': ('<|"|>',)}),
        families=("gemma4", "gemma4_text"),
        calls=(syntax.GEMMA,),
    ),
    ToolForm("FunctionGemma", (("<start_function_call>",),), _mlx_lm("function_gemma"), families=("gemma3_text",)),
    ToolForm(
        "LongCat",
        (("<longcat_tool_call>",),),
        _mlx_lm("longcat"),
        families=("longcat_flash", "longcat_flash_ngram"),
        calls=(syntax.LONGCAT,),
    ),
    ToolForm(
        "Hunyuan",
        ((":opensource", "<tool_calls{}>"),),
        _own(
            own.parse_hunyuan,
            "<tool_calls:opensource>",
            "</tool_calls:opensource>",
            {"<arg_value:opensource>": ("</arg_value:opensource>",)},
        ),
        calls=(syntax.HUNYUAN,),
    ),
    ToolForm(
        "GLM",
        (("<arg_key>",),),
        _mlx_lm("glm47"),
        families=("bailing_moe_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "laguna", "spark2_5"),
        calls=(syntax.GLM,),
    ),
    ToolForm(
        "Python, in markers",
        (("<|tool_list_start|>",), ("<|tool_call_start|>",)),
        _mlx_lm("pythonic"),
        families=("lfm2", "lfm2-vl", "lfm2_moe"),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        calls=(syntax.PYTHON,),
    ),
    ToolForm(
        "Seed",
        (("<seed:tool_call>",),),
        _mlx_lm("qwen3_coder", start="<seed:tool_call>", end="</seed:tool_call>"),
        families=("seed_oss",),
        calls=(syntax.in_functions("<seed:tool_call>", "</seed:tool_call>"),),
    ),
    ToolForm(
        "Qwen3-Coder",
        (("<tool_call>\\n<function=",), ("<tool_call>\n<function=",)),
        _mlx_lm("qwen3_coder"),
        families=("nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "step3p5"),
        calls=(syntax.in_functions("<tool_call>", "</tool_call>"),),
    ),
    ToolForm(
        "Kimi K2",
        (("<|tool_calls_section_begin|>",),),
        _mlx_lm("kimi_k2"),
        families=("deepseek_v3", "kimi_k25", "kimi_linear"),
        calls=(syntax.KIMI,),
    ),
    ToolForm(
        "Kimi K3",
        (("open_tag('tools'",),),
        _mlx_lm("kimi_k3"),
        families=("kimi_k3",),
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
    ToolForm(
        "DeepSeek V3",
        (("<｜tool▁calls▁begin｜>",),),
        _own(own.parse_deepseek, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        families=("deepseek_v3",),
        calls=(syntax.DEEPSEEK, syntax.DEEPSEEK_BLOCKS),
    ),
    *(
        ToolForm(
            f"DeepSeek {version}",
            (("｜DSML｜", f"{block}>"),),
            _own(
                own.parse_dsml,
                f"<｜DSML｜{block}>",
                f"</｜DSML｜{block}>",
                {"<｜DSML｜parameter": ("</｜DSML｜parameter>",)},
            ),
            families=(family,),
            calls=(syntax.dsml(block),),
        )
        for version, block, family in (
            ("V3.2", "function_calls", "deepseek_v32"),
            ("V4", "tool_calls", "deepseek_v41"),
        )
    ),
    ToolForm(
        "MiniCPM5",
        (('<function name="', '<param name="'),),
        _own(
            own.hiding("minicpm5", "</function>", "param"),
            "<function name=",
            "</function>",
            {"<param name=": ("</param>",)},
        ),
        calls=(syntax.MINICPM,),
    ),
    ToolForm(
        "Mistral",
        (("[TOOL_CALLS]",),),
        _own(own.parse_mistral, "[TOOL_CALLS]"),
        families=("llama", "ministral3", "mistral3", "mistral4", "mixtral"),
        calls=(syntax.MISTRAL, syntax.MISTRAL_LIST),
    ),
    ToolForm(
        "Cohere",
        (("<|START_ACTION|>",),),
        _own(own.parse_json, "<|START_ACTION|>", "<|END_ACTION|>"),
        families=("cohere2",),
        calls=(syntax.COHERE,),
    ),
    ToolForm(
        "Solar",
        (("<|tool_call:begin|>",),),
        _own(own.parse_solar, "<|tool_calls|>", "<|calls|>"),
        families=("solar_open",),
        calls=(syntax.SOLAR,),
    ),
    ToolForm(
        "Apertus",
        (("<|tools_prefix|>",),),
        _own(own.parse_apertus, "<|tools_prefix|>", "<|tools_suffix|>"),
        families=("apertus",),
        calls=(syntax.APERTUS,),
    ),
    ToolForm(
        "JSON in <TOOLCALL>",
        (("<TOOLCALL>",),),
        _own(own.parse_json, "<TOOLCALL>", "</TOOLCALL>"),
        families=("nemotron-nas", "nemotron_h"),
        calls=(syntax.in_list("<TOOLCALL>", "</TOOLCALL>"),),
    ),
    ToolForm(
        "JSON in <tool_calls>",
        (("<tool_calls>",),),
        _own(own.parse_json, "<tool_calls>", "</tool_calls>"),
        families=("hunyuan", "hunyuan_v1_dense"),
        calls=(syntax.in_list("<tool_calls>", "</tool_calls>"),),
    ),
    ToolForm(
        "Granite",
        (("<|tool_call|>",),),
        _own(own.parse_json, "<|tool_call|>"),
        families=("granite", "granitemoe"),
        calls=(syntax.in_list("<|tool_call|>"),),
    ),
    ToolForm(
        "GigaChat",
        (("<|function_call|>",),),
        _own(own.parse_json, "<|function_call|>"),
        calls=(syntax.GIGACHAT,),
    ),
    ToolForm(
        "Firefunction",
        (("functools[",),),
        _own(own.parse_functools, "functools["),
        families=("llama",),
        calls=(syntax.in_list("functools"),),
    ),
    ToolForm(
        "Functionary",
        (("<function=", "</function>"),),
        _own(own.parse_functionary, "<function=", "</function>"),
        families=("llama",),
        calls=(syntax.FUNCTIONARY,),
    ),
    ToolForm(
        "Python in <function_calls>",
        (("<function_calls></function_calls>",),),
        _own(own.parse_python, "<function_calls>", "</function_calls>", PYTHON_STRINGS),
        families=("olmo3",),
        calls=(syntax.PYTHON_LINES,),
    ),
    ToolForm(
        "JSON in <tool_call>",
        (("<tool_call>", "tool_call.name"), ("<tool_call>", '{"name": '), ("<tool_call>", '{\\"name\\": ')),
        _mlx_lm("json_tools"),
        families=(
            *("exaone4", "exaone_moe", "granite", "granitemoehybrid", "llama", "mimo", "qwen2", "qwen2_moe"),
            *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
        ),
        calls=(syntax.OBJECT_IN_TAGS,),
    ),
    ToolForm(
        "Llama",
        (("<|python_tag|>",), ('{"name": function name, "parameters"',)),
        _own(own.parse_llama, "<|python_tag|>", bare=("{", "[")),
        families=("llama", "llama4", "llama4_text"),
        calls=(syntax.LLAMA,),
    ),
)
