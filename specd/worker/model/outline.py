"""Checks of a model before its weights are read: whether it can be served, and its tokenizer."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specd.model_info import encoder_conflict, tokenizer_conflict
from specd.startup_error import StartupError
from specd.worker.model.directory import find, is_repository
from specd.worker.model.files import (
    POSITIONS,
    SMALL_FILES,
    SOURCE_POSITIONS,
    WEIGHTS,
    check_files,
    check_tokenizer,
    is_head,
    pickles_in,
    positive_number,
    read_config,
    read_object,
)

_ENCODERS = ("t5", "mt5")
_MODEL_TYPE = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Outline:
    """A model as its small files describe it; `vocabulary` is empty if they do not have it as JSON.

    A head has no tokenizer.
    """

    name: str
    has_encoder: bool
    base_vocabulary: Mapping[str, int]
    vocabulary: Mapping[str, int]
    has_template: bool = False
    is_head: bool = False


def outline_of(name: str) -> Outline:
    """Return the outline of a model. Raises StartupError if it cannot be served.

    It checks all files of a directory, but only the small files of a repository, not its weights.
    """
    directory = find(name, SMALL_FILES)
    config = read_config(directory)
    if is_head(directory):
        return Outline(name, has_encoder=False, base_vocabulary={}, vocabulary={}, is_head=True)
    if Path(name).expanduser().is_dir():
        check_files(directory)
    model_type = check_description(name, directory, config)
    base, whole = _vocabularies(directory)
    return Outline(name, model_type in _ENCODERS, base, whole, _has_template(directory))


def check_description(name: str, directory: Path, config: Mapping[str, Any]) -> str:
    """Return the type of a model with a config. Raises StartupError if its small files show that it cannot be served.

    It reads no file, and does not check weights.
    """
    model_type = _model_type(name, directory, config)
    check_tokenizer(name, directory)
    for values, number in ((config.get("text_config") or config, POSITIONS), (config, SOURCE_POSITIONS)):
        positive_number(name, values, number)
    return model_type


def check_pair(target: Outline, draft: Outline) -> None:
    """Raise StartupError if a draft cannot propose for a target: only one has an encoder, or their tokenizers differ.

    The coordinator checks added tokens that only one tokenizer has.
    """
    if conflict := encoder_conflict(target, draft):
        raise StartupError(conflict)
    if not (target.vocabulary and draft.vocabulary):
        return
    for one, other in ((target, draft), (draft, target)):
        for token, token_id in one.base_vocabulary.items():
            if other.vocabulary.get(token) != token_id:
                there = f"id {other.vocabulary[token]}" if token in other.vocabulary else "missing"
                difference = f"token {token!r} is id {token_id} in {one.name} and {there} in {other.name}"
                raise StartupError(tokenizer_conflict(target, draft, difference))


def check_draft(target: Outline, draft: Outline | None, *, in_target: bool) -> None:
    """Raise StartupError if a target is only a head, or if a draft, a model or a head, cannot propose for it."""
    if target.is_head:
        raise StartupError(f"{target.name} is a head of a model: name the model as the target")
    if draft is None:
        return
    if not draft.is_head:
        check_pair(target, draft)
    elif not in_target:
        raise StartupError(f"{draft.name} is a head, which only a target worker computes: add --draft-in-target")


def check_directories(target: str, draft: str = "", *, in_target: bool = False) -> None:
    """Check a target and its draft, "" without one, where they are directories. Raises StartupError.

    A process that loads them checks this first, because MLX takes seconds to import. Repositories are left to the load.
    """
    of_target, of_draft = (None if not name or is_repository(name) else outline_of(name) for name in (target, draft))
    if of_target is not None:
        check_draft(of_target, of_draft, in_target=in_target)


def check_conversion(name: str, out: Path) -> None:
    """Raise StartupError if a model cannot be converted to `out`. A repository is left to its download."""
    if out.exists():
        raise StartupError(f"{out} exists already: choose another directory, or remove it")
    if is_repository(name):
        return
    directory = find(name)
    config = read_config(directory)
    check_not_quantised(name, config)
    if any(directory.glob(WEIGHTS)):
        check_files(directory)
    else:
        pickled_weights(directory)
    _model_type(name, directory, config)


def check_not_quantised(name: str, config: Mapping[str, Any]) -> None:
    """Raise StartupError if the config of a model says that it is quantised."""
    if "quantization" in config:
        raise StartupError(f"{name} is quantised already: convert the model from which it was made")


def pickled_weights(directory: Path) -> list[Path]:
    """Return the weights of a model that are in pickles. Raises StartupError if it has no weights."""
    if found := [path for path in pickles_in(directory) if path.name.startswith("pytorch_model")]:
        return found
    raise StartupError(f"{directory} has no weights ({WEIGHTS} or pytorch_model*.bin): download them")


def _model_type(name: str, directory: Path, config: Mapping[str, Any]) -> str:
    """Return the type of a model in its config. Raises StartupError if nothing here computes it."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise StartupError(f"{directory / 'config.json'} has no model_type: download the model again")
    if model_type not in _ENCODERS and not _has_class(model_type):
        raise StartupError(f"cannot load the model {name}: mlx-lm has no class for the model type {model_type!a}")
    return model_type


def _has_class(model_type: str) -> bool:
    """Return whether mlx-lm has a class for a model type. Without mlx-lm, the worker reports that it is missing."""
    return bool(_MODEL_TYPE.fullmatch(model_type)) and (_mlx_lm() is None or class_file(model_type) is not None)


@cache
def class_file(model_type: str) -> Path | None:
    """Return the source of mlx-lm's class for a model type, which importing would load MLX; None without one."""
    directory = _mlx_lm()
    if directory is None or not _MODEL_TYPE.fullmatch(model_type):
        return None
    for name in (model_type, _other_names(directory).get(model_type)):
        if name is not None and (file := directory / "models" / f"{name}.py").is_file():
            return file
    return None


def _mlx_lm() -> Path | None:
    package = importlib.util.find_spec("mlx_lm")
    return None if package is None or package.origin is None else Path(package.origin).parent


@cache
def _other_names(directory: Path) -> dict[str, str]:
    """Return the names of classes for model types that have another name."""
    for node in ast.parse((directory / "utils.py").read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(name, "id", "") == "MODEL_REMAPPING" for name in node.targets):
            names: dict[str, str] = ast.literal_eval(node.value)
            return names
    return {}


def _has_template(directory: Path) -> bool:
    """Return whether a model has a chat template, in one of the places where transformers looks for it."""
    if any((directory / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = directory / "tokenizer_config.json"
    return config.is_file() and bool(read_object(config).get("chat_template"))


def _vocabularies(directory: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the map from token to id of tokenizer.json, without and with the added tokens."""
    if not (directory / "tokenizer.json").is_file():
        return {}, {}
    tokenizer = read_object(directory / "tokenizer.json")
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocabulary, list):  # a Unigram model has pairs of a token and its score
            base = {str(token): token_id for token_id, (token, _) in enumerate(vocabulary)}
        else:
            base = {str(token): int(token_id) for token, token_id in (vocabulary or {}).items()}
        added = {str(each["content"]): int(each["id"]) for each in tokenizer.get("added_tokens") or ()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        path = directory / "tokenizer.json"
        raise StartupError(f"{path} is not a tokenizer ({error!r}): download the model again") from error
    return base, {**_added_by_config(directory), **base, **added}


def _added_by_config(directory: Path) -> dict[str, int]:
    path = directory / "tokenizer_config.json"
    entries: Any = read_object(path).get("added_tokens_decoder") if path.is_file() else None
    if not isinstance(entries, dict):
        return {}
    return {
        str(entry["content"]): int(number)
        for number, entry in entries.items()
        if isinstance(entry, dict) and "content" in entry and number.isdecimal()
    }
