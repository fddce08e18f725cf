"""Everything about one model on this machine: `specd models show`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specd.cli.models.cache_facts import cache_numbers_per_token
from specd.cli.models.config_facts import item_bytes
from specd.cli.models.places import State, printable
from specd.cli.models.summary import ModelSummary, refused
from specd.startup_error import StartupError
from specd.worker.model.files import WEIGHTS, read_config, read_object, wanted_in
from specd.worker.model.fingerprint import quick_fingerprint
from specd.worker.model.outline import Outline, check_draft, outline_of
from specd.worker.model.safetensors_file import tensors_in

_FLOAT32_BYTES = 4
_TOKENIZER_FILES = ("*.tiktoken", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.spm")


@dataclass(frozen=True)
class ModelDetails:
    """A summary, and what takes longer to find.

    `files` are names with bytes. `weight_bytes` are those of the weights as stored, `weight_bytes_cpu` in float32, as a
    worker on a CPU holds them; the bytes per token are those of a session's caches. `drafts` are names of models with
    the same tokenizer and fewer bytes.
    """

    summary: ModelSummary
    files: dict[str, int] = field(default_factory=dict)
    tokenizer: str | None = None
    fingerprint: str | None = None
    weight_bytes: int | None = None
    weight_bytes_cpu: int | None = None
    cache_bytes_per_token: int | None = None
    cache_bytes_per_token_cpu: int | None = None
    drafts: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as values of JSON, those of the summary first."""
        own = {name: value for name, value in vars(self).items() if name != "summary"}
        return {**self.summary.as_json(), **own}


def details_of(summary: ModelSummary, others: Iterable[ModelSummary]) -> ModelDetails:
    """Return everything about a model; `others` are the models that could be its drafts."""
    directory = summary.place.directory
    if directory is None:
        return ModelDetails(summary)
    details = ModelDetails(summary, files=_files(directory))
    if summary.state is not State.COMPLETE or not summary.served:
        return details
    details = replace(_with_memory(details, directory), fingerprint=quick_fingerprint(directory))
    if summary.is_head:
        return details
    try:  # `list` does not read tokenizer.json, which takes long
        outline = replace(outline_of(str(directory)), name=summary.name)
    except StartupError as error:
        return replace(details, summary=refused(replace(summary, state=State.DAMAGED), directory, error))
    return replace(details, tokenizer=_tokenizer(directory), drafts=_drafts(summary, outline, others))


def _files(directory: Path) -> dict[str, int]:
    sizes = {}
    for path in sorted(wanted_in(directory)):
        try:
            sizes[printable(path.relative_to(directory))] = path.stat().st_size
        except OSError:
            sizes[printable(path.relative_to(directory))] = 0  # a broken link
    return sizes


def _with_memory(details: ModelDetails, directory: Path) -> ModelDetails:
    """Return details with the memory for weights and for a token in the caches, on a GPU and on a CPU."""
    config = read_config(directory)
    stored, in_float32 = weight_bytes(directory, config)
    per_token = cache_numbers_per_token(config)
    return replace(
        details,
        weight_bytes=stored,
        weight_bytes_cpu=in_float32,
        cache_bytes_per_token=per_token and per_token * item_bytes(config),
        cache_bytes_per_token_cpu=per_token and per_token * _FLOAT32_BYTES,
    )


def weight_bytes(directory: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of a model's weights, as stored and in float32, by the headers of its files alone."""
    paths = sorted(directory.glob(WEIGHTS)) or sorted(directory.glob("*.safetensors"))
    tensors = {name: entry for path in paths for name, entry in tensors_in(path).items()}
    quantization = config.get("quantization")
    numbers = 0
    for name, (_, shape) in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind in {"scales", "biases"} and f"{base}.scales" in tensors and f"{base}.weight" in tensors:
            continue
        if kind == "weight" and f"{base}.scales" in tensors and isinstance(quantization, dict):
            own = quantization.get(base)
            group = own.get("group_size") if isinstance(own, dict) else quantization.get("group_size")
            numbers += math.prod(tensors[f"{base}.scales"][1]) * (group if type(group) is int else 64)
        else:
            numbers += math.prod(shape)
    return sum(path.stat().st_size for path in paths), numbers * _FLOAT32_BYTES


def _tokenizer(directory: Path) -> str | None:
    """Return the kind of a tokenizer, such as "BPE, 151669 tokens", or the name of its file."""
    path = directory / "tokenizer.json"
    if path.is_file():
        tokenizer = read_object(path)
        model = tokenizer.get("model")
        if isinstance(model, dict):
            added = {str(each.get("content")) for each in tokenizer.get("added_tokens") or () if isinstance(each, dict)}
            vocabulary = model.get("vocab")
            tokens = [token[0] for token in vocabulary] if isinstance(vocabulary, list) else vocabulary or ()
            return f"{printable(model.get('type') or 'BPE', 20)}, {len({*tokens} | added):,} tokens"
    return next((found.name for name in _TOKENIZER_FILES for found in directory.glob(name)), None)


def _drafts(target: ModelSummary, outline: Outline, others: Iterable[ModelSummary]) -> list[str]:
    """Return the names of the models that fit as a draft, the smallest first: check_pair's rule, on smaller models."""
    smaller = sorted(filter(lambda other: _may_draft(target, other), others), key=lambda each: each.place.size_bytes)
    return [each.name for each in smaller if _fits(outline, each)]


def _may_draft(target: ModelSummary, other: ModelSummary) -> bool:
    is_smaller = other.place.size_bytes < target.place.size_bytes
    return other.served and not other.is_head and other.place.root != target.place.root and is_smaller


def _fits(target: Outline, draft: ModelSummary) -> bool:
    try:
        outline = outline_of(str(draft.place.directory))
        check_draft(target, outline, in_target=False)
    except StartupError:
        return False
    return bool(target.vocabulary and outline.vocabulary)  # otherwise only a load can compare them
