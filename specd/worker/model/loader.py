"""Loading a model as mlx-lm does, checking that specd can serve it, and describing it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, dequantize_model, load_model, load_tokenizer, maybe_set_recommended_wired_limit

from specd.cache_footprint import CacheFootprint
from specd.errors import StartupError
from specd.model_info import ModelInfo
from specd.user_cache import keep_compiled_kernels
from specd.worker.cpu.optimize import optimize
from specd.worker.engine.cache_users import watch_cache_users
from specd.worker.engine.forms import choose_forms
from specd.worker.engine.forward import agree, bare_cache, enable_batches, has_encoder, rewinds_exactly, trial_logits
from specd.worker.engine.shared_rows import Sharing
from specd.worker.engine.static_step import StaticStep
from specd.worker.heads.head import Head, attach_head
from specd.worker.layers.full import QuantizedCache, quantize_caches
from specd.worker.layers.parts import flatten
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model import gpt2
from specd.worker.model.adapter_files import AdapterFiles
from specd.worker.model.adapters import Adapter, check_fit, check_logits
from specd.worker.model.context import context_length
from specd.worker.model.directory import find
from specd.worker.model.files import POSITIONS, SOURCE_POSITIONS, check_files, check_tokenizer, positive_number
from specd.worker.model.fingerprint import FileState, hashed_files, quick_fingerprint, short_digest
from specd.worker.model.head_loader import load_head
from specd.worker.model.sharding import Shard, shard
from specd.worker.model.special_tokens import end_tokens, start_token
from specd.worker.model.t5.arguments import Arguments
from specd.worker.model.t5.network import T5

log = structlog.get_logger()

# Length of the source in the training of T5 and its relatives, for configs without this field.
_T5_POSITIONS = 512


@dataclass(frozen=True)
class TokenizerConfig:
    """The part of a tokenizer that tokenizer.json leaves out, with the fields of `TokenizerConfig` in model.proto."""

    chat_template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute: `network` maps token ids [batch, length] to logits [batch, length, rows].

    `batches` is whether it computes tokens of several sessions in one pass, `static` its compiled pass, and `sharing`
    the rows that sessions share, where these are faster. `files` are the states of its files. With a `head`, the
    network returns [batch, length, rows + size], the hidden states behind the logits. `adapters` are the same model
    with each of its adapters, by the adapter's name; they have the same weights in memory.
    """

    network: Module
    info: ModelInfo
    tokenizer_json: bytes
    tokenizer_config: TokenizerConfig = TokenizerConfig()
    cache_footprint: CacheFootprint = field(default_factory=CacheFootprint)
    batches: bool = False
    static: StaticStep | None = None
    sharing: Sharing | None = None
    files: tuple[FileState, ...] = ()
    head: LoadedModel | None = None
    adapters: Mapping[str, LoadedModel] = field(default_factory=dict)

    @property
    def with_adapters(self) -> list[LoadedModel]:
        """The model alone, and with each of its adapters."""
        return [self, *self.adapters.values()]


def load(
    name: str,
    *,
    blas: str,
    is_optimized: bool = False,
    kv_bits: int = 16,
    kv_group_size: int = 64,
    head: str = "",
    part: Shard | None = None,
    adapters: Sequence[AdapterFiles] = (),
) -> LoadedModel:
    """Load a model from a local directory or a Hugging Face repository.

    On the CPU backend the weights become float32, because quantised and 16-bit products do not go through BLAS there
    and take time in proportion to the rows. On Metal and CUDA they stay as stored. `is_optimized` selects the faster
    forms for a CPU; otherwise the network is mlx-lm's own. With 8 or 4 `kv_bits`, the caches of full attention are
    quantised in groups of `kv_group_size`. `head` names a head for the model, a directory or a repository; OWN_HEAD is
    the one in the model's own files, if it has one. With `part`, only this rank's part is read, and all ranks compute
    the trials of the model together; then the network is mlx-lm's own. `adapters` are for a model without head and
    parts.

    Raises StartupError if the model does not exist, or if specd cannot serve it.
    """
    assert not (adapters and (head or part))
    directory = find(name)
    check_files(directory)
    check_tokenizer(name, directory)
    try:
        return _load(name, directory, blas, is_optimized, kv_bits, kv_group_size, head, part, adapters)
    except StartupError:
        raise
    except Exception as error:  # values in a config can cause any error of MLX, mlx-lm and this module
        raise StartupError(f"cannot load the model {name}: {_reason(error)}") from error


def _load(
    name: str,
    directory: Path,
    blas: str,
    is_optimized: bool,
    kv_bits: int,
    kv_group_size: int,
    head_name: str,
    part: Shard | None,
    adapter_files: Sequence[AdapterFiles],
) -> LoadedModel:
    files = hashed_files(directory)
    on_cpu = mx.default_device().type == mx.cpu
    fingerprint = quick_fingerprint(directory)
    if not on_cpu:
        keep_compiled_kernels(f"{mx.device_info().get('architecture', 'gpu')}-{fingerprint[:8]}")
    network, config, tokenizer = read(name, directory, lazy=part is not None, adapters=adapter_files)
    if on_cpu:
        network.set_dtype(mx.float32)  # scales become float32 first, so that dequantising does not round to 16 bits
        network = dequantize_model(network)
        network.set_dtype(mx.float32)  # scales of mxfp4, mxfp8 and nvfp4 have no dtype, and dequantise to bfloat16
        precision, device = "float32", f"cpu, {blas}"
    else:
        maybe_set_recommended_wired_limit()
        precision, device = _stored_precision(config), f"gpu, {mx.device_info().get('device_name', 'unknown')}"
    device += _divide(name, network, fingerprint, part)
    try:
        if SessionLayers(network).have_states:
            watch_cache_users(network, by_session=False)
        rows = _num_rows(network)
        most_tokens = context_length(
            name, network, positive_number(name, config.get("text_config") or config, POSITIONS)
        )
        expected = trial_logits(network, batches=False)
        adapters = [Adapter.read(network, each) for each in adapter_files]
    except (ValueError, RuntimeError) as error:  # for example, the device has no kernel for a layer
        raise StartupError(f"cannot compute with the model {name}: {error}") from error
    if on_cpu and is_optimized and part is None:  # replaced layers share out their work to several streams
        optimize(network, rows, lambda: agree(trial_logits(network, batches=False), expected))
    mx.eval(network.parameters())

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise StartupError(f"the model {name} has no tokenizer.json: convert its tokenizer with transformers")
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    batches = enable_batches(network, expected)
    if not rewinds_exactly(network):
        raise StartupError(
            f"specd cannot serve the model {name}: it gives other logits after a rewind, so its caches are of an "
            "unknown kind"
        )
    check_logits(network, adapters, batches=batches)
    head = _with_head(network, directory, batches, head_name, on_cpu and is_optimized) if head_name else None
    if kv_bits < 16:
        _quantize_caches(name, network, batches, kv_bits, kv_group_size)
        fingerprint = short_digest(f"{fingerprint}, {kv_bits}, {kv_group_size}".encode())  # the texts differ
        precision += f", caches in {kv_bits} bits"
    footprint = _footprint(network)
    static, sharing = (
        choose_forms(network, batches=batches, context_length=most_tokens, bytes_per_token=footprint.bytes_for(1))
        # Attention over masked rows is slower on a CPU, and ranks that chose by their own times could differ.
        if not on_cpu and part is None
        else (None, None)
    )
    _meet(part, f"{batches=}")
    # Some models have more rows than tokens, for padding; in some, added tokens have no row.
    size = min(max(vocabulary.values()) + 1, rows)
    trained_source_length = positive_number(name, config, SOURCE_POSITIONS) or _T5_POSITIONS
    info = ModelInfo(
        name=name,
        architecture=str(config["model_type"]),
        fingerprint=fingerprint,
        vocabulary_fingerprint=short_digest(json.dumps(sorted(vocabulary.items())).encode()),
        vocabulary_size=size,
        context_length=most_tokens,
        eos_token_ids=end_tokens(tokenizer.eos_token_ids, size),
        precision=precision,
        device=device,
        decoder_start_token_id=start_token(directory, config, size) if has_encoder(network) else None,
        trained_source_length=trained_source_length if has_encoder(network) else 0,
        adapters=tuple(adapter.info for adapter in adapters),
    )
    if not batches:
        log.warning(
            "the model cannot compute several sessions at once, so they take turns", architecture=info.architecture
        )
    model = LoadedModel(
        network,
        info,
        backend.to_str().encode(),
        TokenizerConfig(chat_template=_template_of(tokenizer), special_tokens=tokenizer.special_tokens_map),
        batches=batches,
        static=static,
        sharing=sharing,
        cache_footprint=footprint,
        files=files,
        head=_described(head, info) if head is not None else None,
    )
    return replace(model, adapters={adapter.info.name: _adapted(model, adapter) for adapter in adapters})


def _template_of(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several templates by name; the others are for tools and retrieval
        template = template.get("default")
    return template or ""


def _adapted(model: LoadedModel, adapter: Adapter) -> LoadedModel:
    """Return a model with an adapter, in the same forms. Its sessions share no rows: buffers would take more memory."""
    network = adapter.on(model.network)
    static = model.static.of(network) if model.static is not None else None
    if static is not None and not agree(trial_logits(network, static=static), trial_logits(network)):
        raise adapter.files.wrong("its compiled pass gives other logits: merge it into its model (mlx_lm.fuse)")
    return replace(model, network=network, info=model.info.with_adapter(adapter.info), static=static, sharing=None)


def _divide(name: str, network: Module, fingerprint: str, part: Shard | None) -> str:
    """Read a rank's part of a network, if it has one, and return what the description of the device then adds."""
    if part is None:
        return ""
    shard(name, network, part)
    part.meet(f"weights of {fingerprint}")
    return f", {part.description}"


def _meet(part: Shard | None, facts: str) -> None:
    if part is not None:
        part.meet(facts)


def _with_head(network: Module, directory: Path, batches: bool, name: str, is_optimized: bool) -> Head | None:
    head = load_head(network, directory, batches=batches, name=name, is_optimized=is_optimized)
    if head is not None:
        attach_head(network, head)
    return head


def _described(head: Head, info: ModelInfo) -> LoadedModel:
    """Return a head of a target as a model. Its fingerprint is of its weights' samples, and of the target's."""
    arrays: Any = tree_flatten(head.parameters())  # type: ignore[no-untyped-call]
    samples = mx.concatenate([weight.flatten()[:16].astype(mx.float32) for _, weight in arrays])
    fingerprint = short_digest(f"{info.fingerprint} {samples.tolist()}".encode())
    return LoadedModel(
        head, replace(info, name=f"{info.name} (head)", fingerprint=fingerprint), b"", batches=head.batches
    )


def _without_head(kind: type[Any]) -> type[Module]:
    """Return mlx-lm's class of a network, without the tensors of a head, which it refuses in a converted model."""

    def sanitize(network: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        kept = {name: weight for name, weight in weights.items() if "mtp." not in name}
        return kind.sanitize(network, kept)  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"sanitize": sanitize})


def _classes(config: dict[str, Any]) -> tuple[type[Module], type]:
    """Return mlx-lm's classes of a network and its arguments, or our own ones."""
    if config["model_type"] in ("t5", "mt5"):
        return T5, Arguments
    network, arguments = _get_classes(config)
    if config["model_type"] == "gpt2":
        gpt2.complete(config)
        network = gpt2.Model
    if config["model_type"] == "qwen3_next":
        network = _without_head(network)
    return network, arguments


def read(
    name: str, directory: Path, *, lazy: bool = False, adapters: Sequence[AdapterFiles] = ()
) -> tuple[Module, dict[str, Any], Any]:
    """Return the network, its configuration and the tokenizer, as mlx-lm creates them.

    With `lazy`, weights are read when they are used; otherwise after a check that the `adapters` fit. Raises
    StartupError.
    """
    try:
        network, config = load_model(directory, lazy=lazy or bool(adapters), get_model_classes=_classes)
        check_fit(network, adapters)
        if adapters:
            mx.eval(network.parameters())
        # Otherwise transformers asks on the terminal whether it may run the tokenizer's own code.
        safely = {"trust_remote_code": False}
        tokenizer = load_tokenizer(directory, safely, eos_token_ids=_as_list(config.get("eos_token_id")))
    except StartupError:
        raise
    except SystemExit as error:  # mlx-lm exits after printing the name of the package
        raise StartupError(f"cannot load the model {name}: its class needs a package that is not installed") from error
    except Exception as error:  # a config or a weight file can cause any error of mlx-lm and transformers
        raise StartupError(f"cannot load the model {name}: {_reason(error)}") from error
    rows, entries = config.get("vocab_size"), len(tokenizer.get_vocab())
    if isinstance(rows, int) and entries < rows // 2:
        raise StartupError(
            f"the model {name} has {rows} tokens, but its tokenizer {entries}: add the missing file of the tokenizer, "
            "such as tokenizer.json or spiece.model"
        )
    return network, config, tokenizer


def _quantize_caches(name: str, network: Module, batches: bool, bits: int, group_size: int) -> None:
    """Quantise the caches of a network.

    The checks of the loader used plain caches, because a value on the border of two levels makes logits differ by more
    than rounding.
    """
    quantize_caches(network, bits=bits, group_size=group_size)
    if not any(isinstance(cache, QuantizedCache) for cache in flatten(SessionLayers(network).caches)):
        raise StartupError(f"the model {name} has no cache of full attention to quantise: leave out --kv-bits")
    try:
        trial_logits(network, batches=batches)
    except Exception as error:  # for example, groups do not divide a head, or attention has sinks
        raise StartupError(f"the model {name} cannot compute with quantised caches (--kv-bits): {error}") from error


def _num_rows(network: Module) -> int:
    """Return the number of rows of the logits, from shapes alone, without computation."""
    logits: mx.array = network(mx.array([[0]]), cache=bare_cache(network).layers.caches)
    return logits.shape[-1]


def _footprint(network: Module) -> CacheFootprint:
    """Return the memory of a session's caches, from shapes alone, without computation."""
    layers = bare_cache(network).layers
    network(mx.array([[0]]), cache=layers.caches)
    return layers.footprint


def _as_list(token_ids: Any) -> list[Any]:
    return token_ids if isinstance(token_ids, list) else [] if token_ids is None else [token_ids]


def _reason(error: Exception) -> str:
    """Return the reason why loading failed. The messages of other errors are unclear without their type."""
    if isinstance(error, (ValueError, OSError, RuntimeError)):
        return str(error)
    return f"{error!r}, probably because a value in config.json has another type than mlx-lm expects"


def _stored_precision(config: dict[str, Any]) -> str:
    quantization = config.get("quantization") or {}
    if "bits" in quantization:
        return f"{quantization['bits']}bit"
    return str(config.get("torch_dtype") or config.get("dtype") or "as stored")
