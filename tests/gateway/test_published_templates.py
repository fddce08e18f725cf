"""The forms of replies in the chat templates of seventy published models, and what the templates themselves write."""

from __future__ import annotations

import json
import re
from typing import Any

from gateway.generation import RequestedGeneration
from gateway.reply.format import detect_format
from gateway.reply.forms import CHANNELS, REASONING, TOOLS
from gateway.reply.parts import Kind, Part, Text
from gateway.reply.reader import ReplyReader
from gateway.reply.tool_parsers import ToolCall
from gateway.served_model import KnownModel, ModelCard
from specd.client import CompletionToken
from specd.text.chat import Chat, ChatTemplate
from specd.vocabulary import TokenSource

# By the template: the marker of the reasoning, the form of the tool calls, and the family of mlx-lm, where it is known.
# What each form means, llama.cpp's tests say too.
EXPECTED = {
    "Apertus-8B-Instruct": ("<|inner_prefix|>", "Apertus", "apertus"),
    "Apriel-1.6-15b-Thinker-fixed": ("Here are my reasoning steps:", "JSON in <tool_calls>", ""),
    "Bielik-11B-v3.0-Instruct": ("<think>", "JSON in <tool_call>", "llama"),
    "ByteDance-Seed-OSS": ("<seed:think>", "Seed", "seed_oss"),
    "Cohere2MoE": ("<|START_THINKING|>", "Cohere", ""),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("", "", "cohere"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("<|START_THINKING|>", "Cohere", "cohere2"),
    "GLM-4.6": ("<think>", "GLM", "glm4_moe"),
    "GLM-4.7-Flash": ("<think>", "GLM", "glm4_moe_lite"),
    "GigaChat3-10B-A1.8B": ("", "", ""),
    "GigaChat3.1-10B-A1.8B": ("", "GigaChat", ""),
    "HuggingFaceTB-SmolLM3-3B": ("<think>", "", "smollm3"),
    "Kimi-K2-Instruct": ("", "Kimi K2", ""),
    "Kimi-K2-Thinking": ("<think>", "Kimi K2", "deepseek_v3"),
    "Kimi-K3": ("<|open|>think<|sep|>", "Kimi K3", "kimi_k3"),
    "LFM2-8B-A1B": ("", "Python, in markers", ""),
    "LFM2.5-8B-A1B": ("<think>", "Python, in markers", "lfm2_moe"),
    "LFM2.5-Instruct": ("<think>", "", ""),
    "MiMo-VL": ("", "JSON in <tool_call>", ""),
    "MiniMax-M1": ("", "JSON in <tool_calls>", ""),
    "MiniMax-M2": ("<think>", "MiniMax M2", "minimax"),
    "MiniMax-M3": ("<mm:think>", "", "minimax_m3_vl"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("", "Mistral", ""),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("<think>", "Qwen3-Coder", "nemotron_h"),
    "NVIDIA-Nemotron-Nano-v2": ("<think>", "JSON in <TOOLCALL>", "nemotron_h"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("", "JSON in <tool_call>", ""),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("", "JSON in <tool_call>", ""),
    "Qwen-QwQ-32B": ("<think>", "JSON in <tool_call>", "qwen2"),
    "Qwen-Qwen2.5-7B-Instruct": ("", "JSON in <tool_call>", ""),
    "Qwen-Qwen3-0.6B": ("<think>", "JSON in <tool_call>", "qwen3"),
    "Qwen3-Coder": ("", "Qwen3-Coder", ""),
    "Qwen3.5-4B": ("<think>", "Qwen3-Coder", "qwen3_5"),
    "Reka-Edge": ("<think>", "JSON in <tool_call>", ""),
    "Spark2.5": ("<think>", "GLM", "spark2_5"),
    "StepFun3.5-Flash": ("<think>", "Qwen3-Coder", "step3p5"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("<think>", "DeepSeek V3", ""),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("<think>", "DeepSeek V3", ""),
    "deepseek-ai-DeepSeek-V3.1": ("<think>", "DeepSeek V3", "deepseek_v3"),
    "deepseek-ai-DeepSeek-V3.2": ("<think>", "DeepSeek V3.2", "deepseek_v32"),
    "deepseek-ai-DeepSeek-V4": ("<think>", "DeepSeek V4", ""),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("<think>", "DeepSeek V4", ""),
    "fireworks-ai-llama-3-firefunction-v2": ("", "Firefunction", ""),
    "google-gemma-2-2b-it": ("", "", "gemma2"),
    "google-gemma-4-31B-it": ("<|channel>thought", "Gemma 4", "gemma4"),
    "google-gemma-4-31B-it-interleaved": ("<|channel>thought", "Gemma 4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("<think>", "Granite", "granite"),
    "ibm-granite-granite-4.0": ("", "JSON in <tool_call>", ""),
    "ibm-granite-granite-4.1": ("", "JSON in <tool_call>", ""),
    "inclusionai-ling-3.0-flash": ("<think>", "GLM", "bailing_moe_v3"),
    "llama-cpp-deepseek-r1": ("<think>", "DeepSeek V3", "deepseek_v3"),
    "llama-cpp-rwkv-world": ("<think>", "", "rwkv7"),
    "meetkai-functionary-medium-v3.1": ("", "Functionary", ""),
    "meetkai-functionary-medium-v3.2": ("", "", ""),
    "meta-llama-Llama-3.1-8B-Instruct": ("", "Llama", ""),
    "meta-llama-Llama-3.2-3B-Instruct": ("", "Llama", ""),
    "meta-llama-Llama-3.3-70B-Instruct": ("", "Llama", ""),
    "microsoft-Phi-3.5-mini-instruct": ("", "", ""),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("[THINK]", "Mistral", "ministral3"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("", "Mistral", ""),
    "moonshotai-Kimi-K2": ("", "Kimi K2", ""),
    "muse-glimmer": ("ATEM", "ATEM", "muse_glimmer"),
    "openai-gpt-oss-120b": ("harmony", "harmony", "gpt_oss"),
    "openbmb-MiniCPM5-1B": ("<think>", "MiniCPM5", ""),
    "poolside-Laguna-S-2.1": ("<think>", "GLM", "laguna"),
    "poolside-Laguna-XS-2.1": ("<think>", "GLM", "laguna"),
    "poolside-Laguna-XS.2": ("<think>", "GLM", "laguna"),
    "tencent-Hy3": ("<think:opensource>", "Hunyuan", ""),
    "unsloth-Apriel-1.5": ("Here are my reasoning steps:", "JSON in <tool_calls>", ""),
    "unsloth-mistral-Devstral-Small-2507": ("", "Mistral", ""),
    "upstage-Solar-Open-100B": ("<|think|>", "Solar", "solar_open"),
}
# These do not write the calls of a conversation, or not in transformers' sandbox.
WRITE_NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "fireworks-ai-llama-3-firefunction-v2",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-deepseek-r1",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "Its path."},
                "size": {"type": "integer", "description": "Its size."},
            },
            "required": ["path"],
        },
    },
}
ARGUMENTS = {"path": "a b.py", "size": 3}
CALL = {"id": "abcdefgh9", "type": "function", "function": {"name": "write_file", "arguments": ARGUMENTS}}
USER = {"role": "user", "content": "Hi"}
# What a generation ends with is no part of its text.
_END = re.compile(r"(<eos>|<\|eot_id\|>|<\|message_sep\|>|<\|END_OF_TURN_TOKEN\|>|<SPECIAL_12>|\s)+$")


def written(source: str, message: dict[str, Any]) -> tuple[str, str]:
    """Return the end of the prompt, and what the template writes for a reply to it."""
    renderer = ChatTemplate(source)._renderer
    fields: Any = {"tools": [TOOL], "tokenize": False, "bos_token": "<bos>", "eos_token": "<eos>"}
    prompt = str(renderer.apply_chat_template([USER], add_generation_prompt=True, **fields))
    whole = str(renderer.apply_chat_template([USER, message], add_generation_prompt=False, **fields))
    differ = (i for i, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other)
    common = prompt[: next(differ, min(len(prompt), len(whole)))]
    if common != prompt:  # a marker is the same or another one, not half of each
        common = common[: common.rindex("<")] if "<" in common[-20:] else common
    return common, _END.sub("", whole[len(common) :])


def read(source: str, prompt_end: str, reply: str) -> list[Part]:
    reader = ReplyReader(detect_format(source, {}), tools=[TOOL], prompt_end=prompt_end)
    parts = reader.push([CompletionToken(1, reply, TokenSource.TARGET)]) + reader.finish(is_cut=False)
    assert not reader.broken_call
    return parts


def test_each_template_shows_its_form(templates: dict[str, str]) -> None:
    found = {}
    for name, source in templates.items():
        form = detect_format(source, {})
        if form.channels is not None:
            found[name] = (form.channels.name, form.channels.name)
            continue
        tools = [each for each in TOOLS if any(all(text in source for text in texts) for texts in each.texts)]
        found[name] = (
            form.reasoning.start if form.reasoning is not None else "",
            tools[0].name if form.reads_calls else "",
        )
    assert found == {name: (reasoning, tools) for name, (reasoning, tools, _) in EXPECTED.items()}


def test_a_family_has_the_forms_of_its_templates() -> None:
    for name, (reasoning, tools, family) in EXPECTED.items():
        if not family:
            continue
        channels = {form.name for form in CHANNELS if family in form.families}
        markers = {form.markers.start for form in REASONING if family in form.families} | channels
        names = {form.name for form in TOOLS if family in form.families} | channels
        assert not reasoning or reasoning in markers, name
        assert not tools or tools in names, name


def test_what_a_template_writes_for_a_call_is_read_as_that_call(templates: dict[str, str]) -> None:
    read_as = {}
    for name, (_, tools, _) in EXPECTED.items():
        if tools and name not in WRITE_NO_CALLS:
            prompt_end, reply = written(templates[name], {"role": "assistant", "content": "", "tool_calls": [CALL]})
            parts = read(templates[name], prompt_end, reply)
            read_as[name] = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    assert len(read_as) > 45
    assert {name: calls for name, calls in read_as.items() if calls != [("write_file", ARGUMENTS)]} == {}


def test_what_a_template_writes_for_reasoning_is_read_as_reasoning(templates: dict[str, str]) -> None:
    said = {"role": "assistant", "content": "So it is.", "reasoning_content": "It may be.", "thinking": "It may be."}
    read_as = {}
    for name, (reasoning, _, _) in EXPECTED.items():
        # Apriel's prompt begins the reasoning in words that the template leaves out of a reply before.
        if not reasoning or name in WRITE_NO_CALLS or name.startswith("Apriel-1.6"):
            continue
        prompt_end, reply = written(templates[name], said)
        if "It may be." not in reply or "So it is." not in reply:
            continue  # many leave out the reasoning of replies before
        texts = dict.fromkeys(Kind, "")
        for part in read(templates[name], prompt_end, reply):
            assert isinstance(part, Text)
            texts[part.kind] += part.text
        read_as[name] = (texts[Kind.REASONING].strip(), texts[Kind.CONTENT].strip()[:9])
    assert len(read_as) > 20
    assert {name: texts for name, texts in read_as.items() if texts != ("It may be.", "So it is.")} == {}


def test_gpt_oss_is_told_why_it_called_a_tool(templates: dict[str, str]) -> None:
    source = templates["openai-gpt-oss-120b"]
    model = KnownModel(ModelCard("gpt-oss", 9, 9, "", source, {}))
    thought = {"role": "assistant", "content": "", "reasoning_content": "It may be.", "tool_calls": [CALL]}
    # The template refuses what a client sends back of a reply with all three.
    for said, told in ((thought, "It may be."), ({**thought, "content": "I write."}, "I write.")):
        prompt = model.asked(RequestedGeneration(Chat((USER, said)), {}), None).generation.prompt
        assert isinstance(prompt, Chat)
        assert f"analysis<|message|>{told}<|end|>" in written(source, dict(prompt.messages[1]))[1]
