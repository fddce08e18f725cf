"""The directory of a model: where it comes from, and which files count."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from huggingface_hub import snapshot_download

from specd.errors import StartupError

log = structlog.get_logger()

# Of tokenizers, sentencepiece's own files too: without them, transformers makes an empty vocabulary and says nothing.
WANTED_FILES = (
    *("*.json", "*.jinja", "*.safetensors", "*.txt", "*.tiktoken"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.spm"),
)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find(name: str, wanted: Sequence[str] = WANTED_FILES) -> Path:
    """Return the directory of a model: it is there, or comes from the hub. Raises StartupError."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise StartupError(f"the model {name} is a file: name the directory that holds config.json and the weights")
    if not _REPOSITORY.fullmatch(name):
        raise StartupError(
            f"there is no model {name}: name a local directory or a Hugging Face repository "
            "such as mlx-community/Qwen3-8B-4bit"
        )
    log.info("looking up the model", repository=name)
    try:
        return Path(snapshot_download(name, allow_patterns=[*wanted]))
    except Exception as error:  # the hub client has dozens of error types, which all mean the same here
        raise StartupError(
            f"there is no directory {name}, and the Hugging Face repository cannot be had: {error}"
        ) from error


def refuse_unsafe_weights(directory: Path) -> None:
    """Raise StartupError unless the directory has safetensors."""
    if not (directory / "config.json").is_file():
        raise StartupError(f"{directory} has no config.json: it is not a model directory")
    if any(directory.glob("model*.safetensors")):
        return
    if pickles := pickles_in(directory):
        names = ", ".join(path.name for path in pickles)
        raise StartupError(
            f"{directory} holds its weights as pickle ({names}), which can run code when loaded: "
            "convert the model with specd convert"
        )
    raise StartupError(f"{directory} has no weights: no model*.safetensors in it")


def pickles_in(directory: Path) -> list[Path]:
    """Return the files of weights that are not safetensors."""
    return sorted(path for path in directory.iterdir() if path.suffix in _PICKLE_SUFFIXES)


def fingerprint_of(directory: Path) -> str:
    """Digest the config and, of each weight file, its size and sixteen samples: gigabytes would take too long."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    sample = 64 * 1024
    for path in sorted(directory.glob("model*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(16):
                file.seek((size - sample) * i // 15 if size > sample else 0)
                digest.update(file.read(sample))
    return digest.hexdigest()[:32]


def digest(data: bytes) -> str:
    """Return a digest, hexadecimal."""
    return hashlib.sha256(data).hexdigest()[:32]


def start_token(directory: Path, config: dict[str, Any]) -> int:
    """Return the token that the answer of an encoder-decoder begins with: of generation_config.json, or config.json."""
    path = directory / "generation_config.json"
    own = json.loads(path.read_text()) if path.is_file() else {}
    known = (own.get("decoder_start_token_id"), config.get("decoder_start_token_id"), config.get("pad_token_id"))
    return next((int(token) for token in known if token is not None), 0)
