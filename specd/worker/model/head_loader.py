"""Loading a target's head. Its weights are in the target's files, in a file beside them, or in a model of their own.

mlx-lm drops a head's tensors when it loads a model, so they are read from the files.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, infer_quant_config

from specd.startup_error import StartupError
from specd.vocabulary import OWN_HEAD
from specd.worker.cpu import openblas
from specd.worker.cpu.optimize import optimize
from specd.worker.engine.forward import agree
from specd.worker.engine.merged_products import merge_where_faster
from specd.worker.heads.head import Head
from specd.worker.heads.head_layout import HeadLayout
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.kind import HeadKind, Tensors
from specd.worker.heads.kinds import kind_named
from specd.worker.heads.layouts import layout_of
from specd.worker.heads.marks import kind_of
from specd.worker.heads.mtp import MTPHead
from specd.worker.heads.pair_head import PairHead
from specd.worker.heads.trials import computes_together, head_logits, states_are_right
from specd.worker.model.directory import find
from specd.worker.model.files import WEIGHTS, read_config
from specd.worker.model.safetensors_file import tensor_names

log = structlog.get_logger()

# Files of a head in the target's directory, as MTPLX writes them. The target's own files are searched last.
_SIDECARS = ("mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors")
_SHIFTED = (RMSNorm.__name__, "ZeroCenteredRMSNorm")  # norms that can multiply by 1 + w; the second is of Step 3.5
_EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(.+)")
_MOST_NAMES, _MOST_CHARACTERS = 3, 100  # in a message


def load_head(
    network: Module, directory: Path, *, batches: bool, name: str = OWN_HEAD, is_optimized: bool = False
) -> Head | None:
    """Return the head of a target, or None if it has none that can be used.

    `network` is the target as the loader made it, from `directory`, and `batches` whether it computes several sessions
    at once. `is_optimized` selects the faster layers for a CPU. `name` is a directory or a Hugging Face repository that
    has only the head. A head in the target's own directory that cannot be used is left out with a warning, because it
    could only make a target faster.

    Raises StartupError if the head of this name cannot be used.
    """
    separate = name if name != OWN_HEAD else None
    try:
        return _load(network, directory, batches, separate, is_optimized=is_optimized)
    except StartupError as error:
        if separate is not None:
            raise
        log.warning("the target does not draft for itself", reason=str(error))
        return None


def _load(network: Module, directory: Path, batches: bool, separate: str | None, *, is_optimized: bool) -> Head | None:
    place = directory if separate is None else find(separate)
    head = read_head(network, directory, None if separate is None else place)
    if head is None:
        return None
    if not states_are_right(head.states, network, batches=batches):
        raise StartupError(f"the head in {place} cannot be used: the target's hidden states do not give its logits")
    _cast(head)
    if is_optimized:
        _optimize(head)
    elif mx.default_device().type != mx.cpu:
        _merge_products(head)
    head.batches = batches and (head.batches or computes_together(head))
    return head


def read_head(network: Module, directory: Path, separate: Path | None = None) -> Head | None:
    """Return the head in a target's files, or in a directory of its own, lazily; None without a head.

    Raises StartupError if there should be a head, or if it does not fit.
    """
    if separate is not None and (name := kind_of(read_config(separate))) is not None:
        return _read_kind(kind_named(name), network, separate)
    config = read_config(directory)
    place = directory if separate is None else separate
    known = layout_of(network)
    if known is None:
        if separate is None:
            return None
        raise StartupError(f"the head in {place} cannot be used: heads for {config.get('model_type')} are not known")
    layout, _ = known
    try:
        tensors, is_converted = _tensors_in(
            _files(place, separate), layout, network, has_bare_names=separate is not None
        )
    except ValueError as error:
        raise StartupError(f"the head in {place} cannot be used: {error}") from error
    if not tensors:
        if separate is None and not (config.get("text_config") or config).get(layout.promise):
            return None
        promises = f", which {layout.promise} in its config.json promises: most converters drop them"
        raise StartupError(
            f"{place} has no tensors of a head (such as mtp.*){promises if separate is None else ''}. Name a directory "
            "or a repository with the head, such as mlx-community/Qwen3.8-27B-MTP-4bit, with --self-draft"
        )
    try:
        head = MTPHead(network, HiddenStates(network, before_norm=layout.before_norm))
    except ValueError as error:
        raise StartupError(f"the head in {place} cannot be used: {error}") from error
    _fill(head, tensors, place, shifts_norms=layout.adds_one and not is_converted)
    return head


def _read_kind(kind: HeadKind, network: Module, place: Path) -> Head:
    """Return the head of a kind with a repository of its own, lazily. Raises StartupError."""
    tensors: Tensors = {}
    for path in sorted(place.glob("*.safetensors")):
        tensor_names(path)  # checks the file before MLX maps it
        tensors |= mx.load(str(path))  # type: ignore[arg-type]
    if not tensors:
        raise StartupError(
            f"the head in {place} has no weights in safetensors: name a repository that has this head with them"
        )
    try:
        tensors = kind.renamed(tensors)
        head = kind.make(read_config(place), network, tensors.keys())
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # a value in config.json can have any type
        reason = str(error) if isinstance(error, ValueError) else f"{error!r}, probably because of its config.json"
        raise StartupError(f"the head in {place} cannot be used: {reason}") from error
    _fill(head, tensors, place, shifts_norms=False)
    return head


def save_head(head: Head, directory: Path) -> None:
    """Write a head into its target's directory, where `load_head` and other programs with such heads find it."""
    tensors: Any = tree_flatten(head.parameters())  # type: ignore[no-untyped-call]
    path = str(directory / _SIDECARS[0])
    mx.save_safetensors(path, {f"mtp.{name}": tensor for name, tensor in tensors}, {"format": "mlx"})


def _files(place: Path, separate: Path | None) -> list[Path]:
    if separate is not None:
        return sorted(place.glob("*.safetensors"))
    return [path for name in _SIDECARS if (path := place / name).is_file()][:1] or sorted(place.glob(WEIGHTS))


def _tensors_in(
    paths: Sequence[Path], layout: HeadLayout, network: Any, *, has_bare_names: bool
) -> tuple[Tensors, bool]:
    """Return the tensors of a head by name, lazily, and whether a converter to MLX has written them.

    A converter adds 1 to the norms, because mlx-lm multiplies by the weight w of a norm where Hugging Face's Qwen
    multiplies by 1 + w. No tensor tells by its values whether it was done, so the layout decides: names without `mtp.`,
    the mark "mlx" in a file, MLX's quantisation or stacks of experts, or a convolution of the target that is turned.
    """
    found: Tensors = {}
    is_converted = False
    for path in paths:
        tensor_names(path)  # checks the file before MLX maps it
        loaded: Any = mx.load(str(path), return_metadata=True)
        held, metadata = loaded
        found |= held
        is_converted |= metadata.get("format") == "mlx"
        is_converted |= any("conv1d.weight" in name and each.shape[-1] == 1 for name, each in held.items())
    own = layout.own(found, len(network.layers))
    if has_bare_names and not own:
        own, is_converted = {name.removeprefix("model."): each for name, each in found.items()}, True
    is_converted |= any(name.endswith(".scales") or ".switch_mlp." in name for name in own)
    return layout.renamed(own, network), is_converted


def _with_stacked_experts(tensors: Mapping[str, mx.array]) -> Tensors:
    """Return the tensors with each projection of all experts in one, [experts, outputs, inputs], as mlx-lm has them.

    Qwen3-Next and Qwen3.5 have a tensor for each expert, Qwen3.6 a stack in which gate and up are one projection.
    """
    stacked: Tensors = {}
    by_expert: dict[str, dict[int, mx.array]] = {}
    for name, tensor in tensors.items():
        if found := _EXPERT.fullmatch(name):
            by_expert.setdefault(f"{found[1]}switch_mlp.{found[3]}", {})[int(found[2])] = tensor
        elif name.endswith(".experts.gate_up_proj"):
            for own, half in zip(("gate_proj", "up_proj"), mx.split(tensor, 2, axis=-2), strict=True):
                stacked[name.replace("experts.gate_up_proj", f"switch_mlp.{own}.weight")] = half
        elif name.endswith(".experts.down_proj"):
            stacked[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = tensor
        else:
            stacked[name] = tensor
    for name, experts in by_expert.items():
        stacked[name] = mx.stack([experts[i] for i in sorted(experts)])
    return stacked


def _fill(head: Module, tensors: Tensors, place: Path, *, shifts_norms: bool) -> None:
    """Give a head its weights. Raises StartupError, which names the tensors that do not fit."""
    remedy = "Download or convert the head again, and check that it belongs to this target"
    try:
        tensors = _with_stacked_experts(tensors)
        quantize(head, class_predicate=lambda path, part: _quantization(path, part, tensors))
    except (ValueError, ZeroDivisionError, IndexError) as error:
        raise StartupError(
            f"the head in {place} has experts or a quantisation of unknown form: {error}. {remedy}"
        ) from error
    wanted: Any = dict(tree_flatten(head.parameters()))
    wrong = {
        "it lacks": [name for name in wanted if name not in tensors],
        "it also has": [name for name in tensors if name not in wanted],
        "these have other shapes than the target needs:": [
            f"{name} {list(tensors[name].shape)} instead of {list(each.shape)}"
            for name, each in wanted.items()
            if name in tensors and tensors[name].shape != each.shape
        ],
    }
    if faults := [f"{fault} {_shown(sorted(names))}" for fault, names in wrong.items() if names]:
        raise StartupError(f"the head in {place} does not fit: {'; '.join(faults)}. {remedy}")
    if shifts_norms:
        norms = [f"{name}.weight" for name, part in head.named_modules() if type(part).__name__ in _SHIFTED]
        tensors |= {name: tensors[name].astype(mx.float32) + 1 for name in norms}
    head.load_weights(list(tensors.items()))


def _cast(head: Head) -> None:
    """Give the weights the target's type, and dequantise them on a CPU, as the loader does with a target."""
    dtype = head.states.dtype
    head.set_dtype(dtype)
    if mx.default_device().type == mx.cpu:
        dequantize_model(head)
        head.set_dtype(dtype)
    head.eval()
    # Tables of angles are not parameters, and another thread could not evaluate them.
    parts: Any = head.modules()  # type: ignore[no-untyped-call]
    mx.eval([value for part in parts for value in part.values() if isinstance(value, mx.array)])


def _optimize(head: Head) -> None:
    """Replace a head's layers like those of its target on a CPU: only beside a target with packed weights.

    Otherwise BLAS has all threads, and packed weights are for one.
    """
    if isinstance(head, PairHead) and openblas.keeps_to_one_thread():
        expected = head_logits(head, batches=False)
        # The head has no embedding that is an output layer: that is the target's own.
        optimize(head, 0, lambda: agree(head_logits(head, batches=False), expected))


def _merge_products(head: Head) -> None:
    """Merge products of a head on a GPU, where that is faster."""
    if not isinstance(head, PairHead):
        return

    def logits() -> mx.array:
        return head_logits(head, batches=False)

    def seconds() -> float:
        begun_at = time.perf_counter()
        mx.eval(logits())
        return time.perf_counter() - begun_at

    merge_where_faster(head, logits, seconds)


def _quantization(path: str, part: Module, tensors: Tensors) -> bool | dict[str, Any]:
    """Return how a layer's weight is quantised, from the shapes: configs name few layers of a head."""
    if not ({f"{path}.weight", f"{path}.scales"} <= tensors.keys() and hasattr(part, "to_quantized")):
        return False
    quantization: dict[str, Any] = infer_quant_config(path, part, tensors)
    return quantization


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(ascii(name)[1:-1][:_MOST_CHARACTERS] for name in names[:_MOST_NAMES]) + (
        f" and {more} more" if more > 0 else ""
    )
