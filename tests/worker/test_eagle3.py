"""EAGLE-3 heads in the forms in which they are published: their logits, exact texts, and those that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specd.sampling import Acceptance, Sampling
from specd.startup_error import StartupError
from specd.worker.heads.eagle3 import Eagle3Head
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.files import is_head
from specd.worker.model.head_loader import load_head, read_head
from specd.worker.model.loader import LoadedModel, load
from specd.worker.session.head_draft import HeadDraft
from tests.thorough import examples
from tests.worker.families import save_family
from tests.worker.head_files import network_of, save_repository
from tests.worker.test_self_draft import COSTS, decode_all, prompts_of, serving

IDS, NEXT = [5, 9, 100, 7, 8000, 3, 44, 2], [9, 100, 7, 8000, 3, 44, 2, 77]
SIZE, ROWS, HEADS, KV_HEADS, HEAD_DIM, INNER, EPS = 32, 8192, 4, 2, 8, 48, 1e-5
LAYER = {
    "model_type": "llama", "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS,
    "vocab_size": ROWS, "max_position_embeddings": 512,
}  # fmt: skip

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class Form:
    """A published form: its configuration, the layers of the target with inputs that it reads, and what it has."""

    config: Mapping[str, Any]
    reads: tuple[int, int, int]
    layer: str = "layers.0."
    num_drafted: int = ROWS
    has: tuple[str, ...] = field(default=("lm_head",))
    is_normed_before_residual: bool = False
    feeds_normed: bool = False
    rope_theta: float = 10000.0


FORMS = {
    "the authors'": Form(
        {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 300},
        (2, 2, 1), "midlayer.", 300, ("lm_head", "d2t"),
    ),
    "SGLang's, by outputs of layers": Form(
        {
            **LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 300,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2], "use_aux_hidden_state": True},
        },
        (2, 1, 3), "midlayer.", 300, ("lm_head", "d2t"),
    ),
    "speculators'": Form(
        {
            "speculators_model_type": "eagle3", "transformer_layer_config": {**LAYER, "rope_parameters":
            {"rope_type": "default", "rope_theta": 5000.0}}, "draft_vocab_size": 300, "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [2, 3, 1],
        },
        (2, 3, 1), num_drafted=300, has=("lm_head", "d2t", "embed_tokens"), is_normed_before_residual=True,
        rope_theta=5000.0,
    ),
    "EAGLE 3.1": Form(
        {
            "speculators_model_type": "eagle3", "transformer_layer_config": LAYER, "draft_vocab_size": 300,
            "norm_before_residual": True, "fc_norm": True, "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        },
        (0, 2, 3), num_drafted=300, has=("lm_head", "d2t", "fc_norm"), is_normed_before_residual=True,
        feeds_normed=True,
    ),
    "a norm before the fusion": Form(
        {
            "speculators_model_type": "eagle3", "transformer_layer_config": LAYER, "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [2, 2, 3],
        },
        (2, 2, 3), has=("lm_head", "input_norm"),
    ),
    "the target's output layer": Form(
        {**LAYER, "architectures": ["Eagle3LlamaForCausalLM"], "eagle_aux_hidden_state_layer_ids": [3, 2, 1]},
        (3, 2, 1), has=(),
    ),
}  # fmt: skip


def weights(form: Form) -> Tensors:
    """Make the tensors of a head, random, by the published names."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (SIZE, 3 * SIZE),
        "norm.weight": (SIZE,),
        **{f"{form.layer}{name}.weight": (SIZE,) for name in ("input_layernorm", "hidden_norm")},
        f"{form.layer}post_attention_layernorm.weight": (SIZE,),
        f"{form.layer}self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * SIZE),
        f"{form.layer}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * SIZE),
        f"{form.layer}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * SIZE),
        f"{form.layer}self_attn.o_proj.weight": (SIZE, HEADS * HEAD_DIM),
        f"{form.layer}mlp.gate_proj.weight": (INNER, SIZE),
        f"{form.layer}mlp.up_proj.weight": (INNER, SIZE),
        f"{form.layer}mlp.down_proj.weight": (SIZE, INNER),
        "lm_head.weight": (form.num_drafted, SIZE),
        "embed_tokens.weight": (ROWS, SIZE),
        "input_norm.weight": (3 * SIZE,),
        **{f"fc_norm.{i}.weight": (SIZE,) for i in range(3)},
    }
    optional = {"lm_head", "embed_tokens", "input_norm", "fc_norm"} - {*form.has}
    mx.random.seed(5)
    tensors = {
        name: 1 + 0.3 * mx.random.normal(shape) if len(shape) == 1 else 1.5 * mx.random.normal(shape) / shape[-1] ** 0.5
        for name, shape in shapes.items()
        if name.partition(".")[0] not in optional
    }
    if "d2t" in form.has:
        ids = mx.sort(mx.random.permutation(ROWS)[: form.num_drafted])
        tensors["d2t"] = ids.astype(mx.int64) - mx.arange(form.num_drafted)
        tensors["t2d"] = mx.zeros(ROWS, mx.bool_)
    return tensors


def save(directory: Path, form: Form, tensors: Tensors | None = None) -> str:
    return save_repository(directory, form.config, weights(form) if tensors is None else tensors)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "target"
    save_family(directory, "qwen3")
    return directory


def inputs_of_layers(network: Any) -> list[mx.array]:
    """Return the inputs [n, size] of the target's layers for IDS."""
    x = network.model.embed_tokens(mx.array([IDS]))
    inputs = []
    for layer, cache in zip(network.layers, SessionLayers(network).caches, strict=True):
        inputs.append(x[0])
        x = layer(x, mask="causal", cache=cache)
    return inputs


def by_hand(form: Form, named: Tensors, network: Any, embed: Callable[[mx.array], mx.array]) -> np.ndarray[Any, Any]:
    """Return the logits [2, rows] after all pairs of IDS, and after one more that was drafted, in float64."""
    w = {name: np.array(each.astype(mx.float32), np.float64) for name, each in named.items() if name != "t2d"}
    layer = {name.removeprefix(form.layer): each for name, each in w.items() if name.startswith(form.layer)}
    read_states = [np.array(inputs_of_layers(network)[i], np.float64) for i in form.reads]
    if "fc_norm" in form.has:
        read_states = [norm(each, w[f"fc_norm.{i}.weight"]) for i, each in enumerate(read_states)]
    fused = np.concatenate(read_states, axis=-1)
    if "input_norm" in form.has:
        fused = norm(fused, w["input_norm.weight"])
    states, tokens = fused @ w["fc.weight"].T, list(NEXT)
    logits = []
    for _ in range(2):
        embedded = np.array(embed(mx.array(tokens)), np.float64)
        normed = norm(states, layer["hidden_norm.weight"])
        pairs = np.concatenate([norm(embedded, layer["input_layernorm.weight"]), normed], axis=-1)
        x = (normed if form.is_normed_before_residual else states) + attention(layer, pairs, form.rope_theta)
        inner = norm(x, layer["post_attention_layernorm.weight"])
        gate, up = inner @ layer["mlp.gate_proj.weight"].T, inner @ layer["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
        last = norm(x[-1:], w["norm.weight"])
        if "lm_head" in form.has:
            own = last @ w["lm_head.weight"].T
        else:
            own = np.array(network.model.embed_tokens.as_linear(mx.array(last.astype(np.float32))))
        row = np.full(ROWS, -np.inf)
        row[np.arange(form.num_drafted) + w.get("d2t", np.zeros(form.num_drafted)).astype(int)] = own[0]
        logits.append(row)
        states = np.concatenate([states, last if form.feeds_normed else x[-1:]])
        tokens.append(int(row.argmax()))
    return np.stack(logits)


def norm(x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def attention(w: Mapping[str, Any], x: np.ndarray[Any, Any], theta: float) -> np.ndarray[Any, Any]:
    n = len(x)
    angles = np.arange(n)[:, None, None] * theta ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def rotated(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        first, second = rows[..., : HEAD_DIM // 2], rows[..., HEAD_DIM // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    queries = rotated((x @ w["self_attn.q_proj.weight"].T).reshape(n, HEADS, HEAD_DIM))
    keys = rotated((x @ w["self_attn.k_proj.weight"].T).reshape(n, KV_HEADS, HEAD_DIM))
    values = (x @ w["self_attn.v_proj.weight"].T).reshape(n, KV_HEADS, HEAD_DIM)
    keys, values = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (keys, values))
    scores = np.where(np.tri(n, dtype=bool), np.einsum("qhd,khd->hqk", queries, keys) / HEAD_DIM**0.5, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    output: np.ndarray[Any, Any] = np.einsum("hqk,khd->qhd", shares, values).reshape(n, -1)
    return output @ w["self_attn.o_proj.weight"].T


def chained(head: Any) -> np.ndarray[Any, Any]:
    """Return the head's logits [2, rows] after all pairs of IDS, and after one more that was drafted."""
    _, hidden = head.states.run(mx.array([IDS]), SessionLayers(head.states.network).caches)
    layers = SessionLayers(head)
    states = head(mx.array([NEXT]), head.fuse(hidden[0])[None], layers.caches)[:, -1:]
    layers.fed(len(NEXT))
    first = head.logits(states)
    second = head.logits(head(mx.argmax(first, axis=-1), states, layers.caches))
    return np.array(mx.concatenate([first, second], axis=1)[0])


@pytest.mark.parametrize("name", FORMS)
def test_a_published_head_gives_the_logits_by_hand(name: str, target: Path, tmp_path: Path) -> None:
    form, network = FORMS[name], network_of(target)
    tensors = weights(form)
    save(tmp_path / "head", form, tensors)
    assert is_head(tmp_path / "head")
    head: Any = read_head(network, target, tmp_path / "head")
    embed = head.embed_tokens if "embed_tokens" in form.has else network.model.embed_tokens
    expected = by_hand(form, tensors, network, embed)
    logits = chained(head)
    drafts = np.isfinite(expected)
    assert drafts.sum() == 2 * form.num_drafted
    assert logits[~drafts].max(initial=-1e30) < -1e29
    assert expected[drafts].std() > 0.3
    np.testing.assert_allclose(logits[drafts], expected[drafts], atol=1e-4)


@pytest.mark.parametrize("name", ["the authors'", "speculators'", "a norm before the fusion"])
def test_a_head_equals_that_of_mlx_vlm(name: str, target: Path, tmp_path: Path) -> None:
    """Those of its forms that mlx-vlm has: `pip install --no-deps mlx-vlm` is enough."""
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters.eagle3", reason="mlx-vlm is not installed")
    form, network = FORMS[name], network_of(target)
    tensors = weights(form)
    save(tmp_path / "head", form, tensors)
    head: Any = read_head(network, target, tmp_path / "head")
    config = {"transformer_layer_config": LAYER, **form.config}
    theirs = drafters.Model(drafters.ModelConfig.from_dict(config))
    named = {each.replace("midlayer.", "layers.0."): tensor for each, tensor in tensors.items()}
    theirs.load_weights(list(theirs.sanitize(named).items()), strict=False)
    if "embed_tokens" not in form.has:
        theirs.embed_tokens = network.model.embed_tokens
    theirs._cache = theirs.make_cache()
    _, hidden = head.states.run(mx.array([IDS]), SessionLayers(network).caches)
    expected = theirs._logits(theirs._forward_tokens(mx.array([NEXT]), hidden, mx.int32))[0, -1]
    ids = theirs._draft_to_target(mx.arange(form.num_drafted), mx.int32)
    np.testing.assert_allclose(chained(head)[0][np.array(ids)], np.array(expected), atol=1e-4)


def with_head(target: Path, tmp_path: Path, form: Form) -> LoadedModel:
    model = load(str(target), blas="", is_optimized=True, head=save(tmp_path / "head", form))
    assert model.head is not None
    assert model.head.batches
    assert isinstance(model.head.network, Eagle3Head)
    return model


@pytest.mark.parametrize("name", examples(FORMS, 3))
async def test_texts_are_those_of_the_target_alone(name: str, target: Path, tmp_path: Path) -> None:
    model = with_head(target, tmp_path, FORMS[name])
    assert model.head is not None
    for temperature, acceptance in ((0.0, Acceptance.COUPLED), (1.0, Acceptance.COUPLED)):
        sampling, prompts = Sampling(temperature=temperature, seed=2, acceptance=acceptance), prompts_of(2, 4)
        async with serving(None, model) as service:
            expected, _ = await decode_all(service, sampling, prompts, (0,), seed=2, is_erratic=False)
        async with serving(HeadDraft(model.head.info, COSTS), model) as service:
            said, callers = await decode_all(service, sampling, prompts, (0, 1, 4), seed=2, is_erratic=True)
            assert {fault for each in callers for fault in each.faults} <= {""}
            assert any(each.proposals for each in callers)
        assert said == expected


async def test_rejection_proposes_from_a_smaller_vocabulary(target: Path, tmp_path: Path) -> None:
    form = FORMS["the authors'"]
    model = with_head(target, tmp_path, form)
    assert model.head is not None
    drafted = {i + int(offset) for i, offset in enumerate(np.array(weights(form)["d2t"]))}
    sampling = Sampling(temperature=1.0, seed=1, acceptance=Acceptance.REJECTION)
    async with serving(HeadDraft(model.head.info, COSTS), model) as service:
        _, callers = await decode_all(service, sampling, prompts_of(1, 3), (3,), seed=1, is_erratic=False)
    proposals = [token for each in callers for _, proposal in each.proposals for token in proposal]
    assert len(proposals) > 30
    assert {*proposals} <= drafted


FAULTS: dict[str, tuple[Mapping[str, Any], Callable[[Tensors], Tensors], str]] = {
    "missing": ({}, lambda w: {n: t for n, t in w.items() if n != "fc.weight"}, "it lacks fc.weight"),
    "unknown": ({}, lambda w: w | {"q_norm.weight": mx.zeros(3)}, "it also has q_norm.weight"),
    "shape": ({}, lambda w: w | {"fc.weight": mx.zeros((32, 64))}, r"fc.weight \[32, 64\] instead of \[32, 96\]"),
    "layers": ({"num_hidden_layers": 2}, lambda w: w, "it has 2 layers, and one is supported"),
    "no such layer": (
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, lambda w: w, "has 4 layers, and none with the number 9",
    ),
    "larger vocabulary": (
        {"draft_vocab_size": 9000}, lambda w: {n: t for n, t in w.items() if n != "d2t"}, "drafts 9000 tokens",
    ),
    "another type": ({"hidden_size": "32"}, lambda w: w, "probably because of its config.json"),
    "no weights": ({}, lambda w: {}, "has no weights in safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(fault: str, target: Path, tmp_path: Path) -> None:
    changes, change, reason = FAULTS[fault]
    form = FORMS["the authors'"]
    tensors = change(weights(form))
    save(tmp_path / "head", Form({**form.config, **changes}, form.reads), tensors or {"unused": mx.zeros(1)})
    if not tensors:
        (tmp_path / "head" / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=reason):
        load_head(network_of(target), target, batches=False, name=str(tmp_path / "head"))
