"""Checks of a model's files, which are untrusted input, before anything parses or maps one of them."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from specd.model_info import MAX_TOKENIZER_BYTES
from specd.startup_error import StartupError
from specd.worker.heads.marks import kind_of
from specd.worker.model.safetensors_file import tensor_names

# Returns the names of the tensors in a file, after its header is checked.
Names = Callable[[Path], Sequence[str]]
WEIGHTS = "model*.safetensors"
# Tokenizer files include sentencepiece's own, without which transformers makes an empty vocabulary without an error.
WANTED_FILES = (
    *("*.json", "*.jinja", "*.safetensors", "*.txt", "*.tiktoken"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.spm"),
)
# Copies of a repository's weights for other programs, which would double the download.
UNWANTED_FILES = ("consolidated*.safetensors", "original/*", "metal/*", "onnx/*", "openvino/*")
# For people, beside a model: its licence is there.
CARD_FILES = ("README.md", "LICENSE", "LICENSE.md", "LICENCE")
# The files that describe a model, which are downloaded before its weights.
SMALL_FILES = tuple(name for name in WANTED_FILES if name not in {"*.safetensors", "*.json"})
SMALL_FILES += ("*config.json", "tokenizer.json", "vocab.json", "chat_template.json")
_TOKENIZERS = ("tokenizer.json", "*.model", "*.spm", "*.tiktoken", "vocab.*")
# Fields of a config with a number of positions.
POSITIONS, SOURCE_POSITIONS = "max_position_embeddings", "n_positions"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TEMPLATES = "additional_chat_templates"
_EMBEDDING = "embed_tokens."  # of a model
_FUSION = re.compile(r"(?:(?:.*\.)?mtp\.)?fc\.[^.]+")  # of a head
_HEAD = "mtp"  # a folder with the weights of a head
# The limit of the first pattern that matches holds. The longest indexes have 10 MB.
_MOST_BYTES = {
    "*.safetensors": 2**50,
    "*.safetensors.index.json": 64 * 2**20,
    "config.json": 2**20,
    "generation_config.json": 2**20,
    "adapter_config.json": 2**20,
    "*.jinja": 2**20,
    "*": MAX_TOKENIZER_BYTES,
}
# Names in configs for a number of layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers")


def is_head(directory: Path, names_in: Names = tensor_names) -> bool:
    """Return whether a directory has the head of another model, and no model: it has no embedding. Raises StartupError.

    Before its weights are downloaded, only the configuration tells. `names_in` reads the headers, as `tensor_names`.
    """
    config = read_config(directory)
    if kind_of(config) is not None or str(config.get("model_type", "")).endswith("_mtp"):
        return True
    names = [name for path in directory.glob("*.safetensors") for name in names_in(path)]
    return any(_FUSION.fullmatch(name) for name in names) and not any(
        name.startswith(_EMBEDDING) or f".{_EMBEDDING}" in name for name in names
    )


def check_files(directory: Path, names_in: Names = tensor_names) -> None:
    """Raise StartupError unless a directory holds a model in safetensors that is safe to read.

    Every file that a worker reads must be a plain file in the directory, or in the `blobs` of the same repository in
    the cache of the Hugging Face hub, and must not be too large. The headers of all weights must be sound, without a
    tensor that occurs twice. The config must not ask for code. Reads a 70 B model's headers in a few hundredths of a
    second; `names_in` does this, as `tensor_names`.
    """
    config = read_config(directory)
    text: dict[str, Any] = config.get("text_config") or {}
    num_tensors = _check_weights(directory, names_in)
    for counts in (config, text):
        for name in _LAYERS:
            if isinstance(count := counts.get(name), int) and count > num_tensors:
                raise StartupError(
                    f"{directory / 'config.json'} has {name} larger than the number of tensors, {num_tensors}: "
                    "download or convert the model again"
                )


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json of a directory with a model's small files. Raises StartupError if it must not be used."""
    check_plain(directory)
    config = read_object(directory / "config.json")
    if "model_file" in config:
        raise StartupError(
            f"{directory / 'config.json'} asks for the model's own code (model_file is {config['model_file']!a}), "
            "which specd never runs: use a model whose class mlx-lm has"
        )
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise StartupError(f"{directory / 'config.json'}: text_config is {text!a}, but it must be an object")
    return config


def check_plain(directory: Path) -> None:
    """Raise StartupError unless the files that may be read are plain, belong to the model, and are not too large."""
    if not (directory / "config.json").is_file():
        raise StartupError(f"{directory} has no config.json, so it is not a model: name a model's directory")
    check_plain_files(directory, wanted_in(directory))


def check_plain_files(directory: Path, paths: Iterable[Path]) -> None:
    """Raise StartupError unless files of a directory are plain, belong to it, and are not too large."""
    root = Path(os.path.realpath(directory))
    for path in paths:
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(place) for place in _places(root)):
            raise StartupError(
                f"{path} is a link out of the model's directory, to {real}: replace it with the file itself"
            )
        try:
            status = path.stat()
        except OSError as error:
            raise StartupError(f"{path} cannot be read ({error.strerror}): download the model again") from error
        if not stat.S_ISREG(status.st_mode):
            raise StartupError(f"{path} is a pipe, a device or a directory: replace it with a plain file")
        most = next(most for pattern, most in _MOST_BYTES.items() if fnmatch(path.name, pattern))
        if status.st_size > most:
            raise StartupError(
                f"{path} has {status.st_size} bytes, but no model needs more than {most} in such a file: "
                "download the model again, from a source that you trust"
            )


def positive_number(name: str, config: Mapping[str, Any], field: str) -> int | None:
    """Return a number of tokens in a config, or None without one. Raises StartupError for an invalid value."""
    value = config.get(field)
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value < math.inf):
        return None if value is None else int(value)
    raise StartupError(f"config.json of the model {name}: {field} is {value!a}, but it must be a number, at least 1")


def check_tokenizer(name: str, directory: Path) -> None:
    """Raise StartupError if a model has no tokenizer. transformers' own error does not name the missing file."""
    if not any(any(directory.glob(pattern)) for pattern in _TOKENIZERS):
        raise StartupError(
            f"{name} has no tokenizer.json: download the model again with its tokenizer, or copy that file from the "
            "original model"
        )


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises StartupError, which names the file."""
    try:
        value = json.loads(path.read_bytes())
    except RecursionError as error:
        raise StartupError(f"{path} is nested too deeply: download the model again") from error
    except (ValueError, OSError) as error:
        raise StartupError(f"{path} cannot be read ({error}): download the model again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object: download the model again")
    return value


def pickles_in(directory: Path) -> list[Path]:
    """Return the files with weights that are not safetensors."""
    return sorted(path for path in directory.iterdir() if path.suffix in _PICKLE_SUFFIXES)


def wanted_in(directory: Path) -> Iterator[Path]:
    """Return the files of a directory that may be read."""
    for path in sorted(directory.iterdir()):
        if path.name == _TEMPLATES and path.is_dir():
            yield from sorted(path.iterdir())
        elif path.name == _HEAD and path.is_dir():
            yield from sorted(path.glob("*.safetensors"))
        elif any(fnmatch(path.name, pattern) for pattern in WANTED_FILES):
            yield path


def _places(root: Path) -> Iterator[Path]:
    """Return the directories that may hold a model's files: its own, and its blobs in the hub's cache.

    In models--ORG--NAME/snapshots/REVISION of that cache, files are links to models--ORG--NAME/blobs.
    """
    yield root
    if root.parent.name == "snapshots" and root.parents[1].name.startswith("models--"):
        yield root.parents[1] / "blobs"


def _check_weights(directory: Path, names_in: Names) -> int:
    """Return the number of tensors. Raises StartupError unless all weights are sound safetensors."""
    paths = sorted(directory.glob(WEIGHTS))
    if not paths:
        if pickles := pickles_in(directory):
            names = ", ".join(path.name for path in pickles)
            raise StartupError(
                f"{directory} has its weights as pickle ({names}), which can run code when loaded: "
                "convert the model with specd convert"
            )
        raise StartupError(f"{directory} has no weights ({WEIGHTS}): download the model again")
    found: dict[str, Path] = {}
    for path in paths:
        for name in names_in(path):
            if name in found:
                raise StartupError(
                    f"the tensor {name!a} is in both {found[name].name} and {path.name} of {directory}: remove the "
                    "file that does not belong to the model"
                )
            found[name] = path
    for index in directory.glob(f"{WEIGHTS}.index.json"):
        _check_index(index, found)
    return len(found)


def _check_index(index: Path, found: Mapping[str, Path]) -> None:
    """Raise StartupError unless all files in an index of shards exist beside it."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise StartupError(f"{index} has no weight_map: download the model again")
    for file in {value if isinstance(value, str) else "" for value in weight_map.values()}:
        if Path(file).name != file or not file:
            raise StartupError(f"{index} names {file!a}, which is not a file beside it: remove the index")
        if not (index.parent / file).is_file():
            raise StartupError(f"{index} names {file!a}, which is missing: download the model again")
