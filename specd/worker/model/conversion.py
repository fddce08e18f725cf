"""Conversion of a model to another precision, or to quantised weights.

It reads a model as the loader does, so both support the same kinds, and writes it with mlx-lm's own functions. Only
this command of the user's reads pickles, with PyTorch's loader that accepts nothing but tensors; a worker never does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import quantize_model, save_config, save_model

from specd.errors import StartupError
from specd.worker.engine.forward import bare_cache, forward, has_encoder
from specd.worker.engine.jobs import Feed
from specd.worker.heads.head import Head
from specd.worker.model.directory import find
from specd.worker.model.files import WANTED_FILES, WEIGHTS, check_files, check_plain, wanted_in
from specd.worker.model.head_loader import read_head, save_head
from specd.worker.model.loader import read
from specd.worker.model.outline import check_conversion, check_not_quantised, pickled_weights
from specd.worker.model.special_tokens import start_token

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

_TRIAL_TEXT = "summarize: def add(a, b): return a + b"
_NUM_TRIAL_TOKENS = 8

Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def convert(
    name: str, out: Path, *, bits: int | None, group_size: int, dtype: str | None, check: bool, progress: Progress
) -> str:
    """Write a model from a directory or a Hugging Face repository to `out`; return the result of the check in words.

    `bits` (4 or 8) quantises the matrices in groups of `group_size`. `dtype`, a key of DTYPES, is for all other
    weights; None keeps their precision. With `check` and PyTorch, the first greedy tokens must equal transformers'.
    `progress(items, title)` yields the items. `out` appears only when it is complete. Raises StartupError.
    """
    check_conversion(name, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=".convert-") as work:
        directory = find(name)
        check_plain(directory)
        if not any(directory.glob(WEIGHTS)):
            directory = _from_pickles(find(name, (*WANTED_FILES, "pytorch_model*.bin")), Path(work, "source"), progress)
        check_files(directory)
        found = _check(name, directory) if check else "not checked against the original (--no-check)"
        network, config, tokenizer = read(name, directory, lazy=True)
        check_not_quantised(name, config)
        head, without_head = _head(network, directory)
        if dtype:
            config = _cast(network, config, dtype)
        if bits:
            network, config = quantize_model(network, config, group_size, bits)
        if head is not None:
            _convert_head(head, network, bits, group_size, dtype)
        arrays: Any = tree_flatten(network.parameters())
        for _, weight in progress(arrays, "Converting"):
            mx.eval(weight)
        written = Path(work, "model")
        save_model(written, network, donate_model=True)
        save_config(config, config_path=written / "config.json")
        if head is not None:
            save_head(head, written)
        tokenizer.save_pretrained(written)
        if (directory / "generation_config.json").is_file():
            shutil.copy(directory / "generation_config.json", written)
        network, _, _ = read(str(out), written, lazy=True)  # checks the names and shapes as a worker does
        if head is not None:
            read_head(network, written)
        written.rename(out)
    return f"{found}; {without_head}" if without_head else found


def _head(network: Module, directory: Path) -> tuple[Head | None, str]:
    """Return the head of a model; or None, and the reason if its config promises a head."""
    try:
        return read_head(network, directory), ""
    except StartupError as error:
        return None, f"without a head: {error}"


def _convert_head(head: Head, network: Any, bits: int | None, group_size: int, dtype: str | None) -> None:
    """Cast and quantise a head as its target: some layers, such as routers, keep more bits."""
    if dtype:
        head.set_dtype(DTYPES[dtype])
    chooses = getattr(network, "quant_predicate", None) or (lambda *_: True)
    like = f"model.layers.{len(network.layers) - 1}."  # some predicates read the number of a layer in its path

    def choose(path: str, part: Any) -> Any:
        fits = hasattr(part, "to_quantized") and part.weight.shape[-1] % group_size == 0
        return fits and chooses(path.replace("layers.0.", like, 1), part)

    if bits:
        quantize(head, group_size, bits, class_predicate=choose)


def _cast(network: Module, config: dict[str, Any], dtype: str) -> dict[str, Any]:
    wants = getattr(network, "cast_predicate", lambda _: True)  # some keep a few weights in float32

    def cast(name: str, weight: mx.array) -> mx.array:
        return weight.astype(DTYPES[dtype]) if wants(name) and mx.issubdtype(weight.dtype, mx.floating) else weight

    network.update(tree_map_with_path(cast, network.parameters()))
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}


def _from_pickles(directory: Path, out: Path, progress: Progress) -> Path:
    """Return a directory with the same model in safetensors. Only PyTorch's safe loader reads a pickle.

    The safe loader accepts tensors and nothing that could run code (`weights_only`).
    """
    pickles = pickled_weights(directory)
    try:
        import torch
        from safetensors.torch import save_file
    except ImportError as error:
        raise StartupError(
            f"{directory} has its weights as pickle ({pickles[0].name}), which only PyTorch can read: "
            "pip install 'specd[convert]'"
        ) from error
    out.mkdir()
    for i, path in enumerate(progress(pickles, "Reading pickles")):
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle has many errors; torch's own names the refused object
            raise StartupError(f"cannot read {path} safely: {error}") from error
        # One copy each, because tied weights share their memory, which safetensors refuses.
        save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, out / f"model-{i}.safetensors")
    for path in wanted_in(directory):
        if path.parent == directory and not path.name.endswith(".bin.index.json"):
            shutil.copyfile(path, out / path.name)
    return out


def _check(name: str, directory: Path) -> str:
    """Compare the first greedy tokens with those of transformers. Raises StartupError if they differ."""
    try:
        import torch  # type: ignore[import-not-found,unused-ignore] # noqa: F401 - for transformers
    except ImportError:
        return "not checked against the original: PyTorch is not installed (pip install 'specd[convert]')"
    network, config, tokenizer = read(name, directory, lazy=True)
    network.set_dtype(mx.float32)
    prompt = tokenizer.encode(_TRIAL_TEXT)
    start = start_token(directory, config, config["vocab_size"]) if has_encoder(network) else 0
    own = _greedy(network, prompt, start)
    theirs = _greedy_of_transformers(directory, prompt, start, is_t5=has_encoder(network))
    if own != theirs:
        raise StartupError(
            f"specd cannot use {name}, because mlx-lm computes other tokens than transformers: {own}, not {theirs}"
        )
    return f"its first {len(own)} greedy tokens equal transformers'"


def _greedy(network: Module, prompt: Sequence[int], start: int) -> list[int]:
    tokens: list[int] = []
    cache, pending = bare_cache(network, source=prompt), [start] if has_encoder(network) else [*prompt]
    for _ in range(_NUM_TRIAL_TOKENS):
        (logits,) = forward([Feed(cache, mx.array(pending))])
        pending = [int(mx.argmax(logits[-1]))]
        tokens += pending
    return tokens


def _greedy_of_transformers(directory: Path, prompt: Sequence[int], start: int, *, is_t5: bool) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if is_t5 else AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
    tokens: list[int] = []
    with torch.no_grad():
        for _ in range(_NUM_TRIAL_TOKENS):
            if is_t5:
                output = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([[start, *tokens]]))
            else:
                output = model(torch.tensor([[*prompt, *tokens]]))
            tokens.append(int(output.logits[0, -1].argmax()))
    return tokens
