"""Made-up models on a disk: directories, and repositories as the Hugging Face hub's cache has them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMMIT = "a" * 40
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
WORDS = {"a": 0, "b": 1, "c": 2}


def weights(*names: str, size: int = 4) -> bytes:
    """Return a safetensors file that has tensors with these names, of `size` numbers each."""
    header = {
        name: {"dtype": "F32", "shape": [size], "data_offsets": [4 * size * i, 4 * size * (i + 1)]}
        for i, name in enumerate(names or ("model.embed_tokens.weight", "w", "v"))
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * size * len(header))


def tokenizer(words: Mapping[str, int] = WORDS) -> dict[str, Any]:
    """Return the content of a tokenizer.json."""
    return {"model": {"type": "BPE", "vocab": dict(words)}, "added_tokens": []}


def model_files(config: Mapping[str, Any] = LLAMA, **others: Any) -> dict[str, Any]:
    """Return the files of a whole model; `others` have the name of a file with __ for a dot, and None removes one."""
    files = {"config.json": config, "tokenizer.json": tokenizer(), "model.safetensors": weights()}
    files |= {name.replace("__", "."): content for name, content in others.items()}
    return {name: content for name, content in files.items() if content is not None}


def content_of(value: Any) -> bytes:
    """Return the bytes of a file: bytes as they are, a text encoded, and other values as JSON."""
    return (
        value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else json.dumps(value).encode()
    )


def write_directory(directory: Path, files: Mapping[str, Any]) -> Path:
    """Write a model as a plain directory."""
    for name, value in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content_of(value))
    return directory


def write_repository(
    cache: Path, name: str, files: Mapping[str, Any], *, listed: Mapping[str, int] | None = None
) -> Path:
    """Write a model into a hub's cache, and return its root; `listed` are the files that the hub has told, by size."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for directory in (snapshot, root / "blobs", root / "refs"):
        directory.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for file, value in files.items():
        content = content_of(value)
        blob = root / "blobs" / hashlib.sha256(content + file.encode()).hexdigest()
        blob.write_bytes(content)
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    if listed is not None:
        (root / "trees").mkdir()
        entries = {file: {"size": size, "blob_id": "0" * 40} for file, size in listed.items()}
        (root / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": entries}))
    return root
