"""The header of a safetensors file, which must describe the whole file before anything maps or parses it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from specd.startup_error import StartupError

# Bytes of an element, for the types that MLX loads.
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "C64"), 8),
}
# About 250,000 tensors: three times as many as the largest models have in all their files.
_MOST_HEADER_BYTES = 32 * 2**20
_LENGTH_BYTES = 8
_MOST_DIMENSIONS = 16
_LARGEST_DIMENSION = 2**31 - 1  # the largest dimension of an array in MLX
_METADATA = "__metadata__"


def tensor_names(path: Path) -> list[str]:
    """Check the header of a safetensors file, and return the names of its tensors.

    The data of the tensors must fill the rest of the file, one after the other, without a gap, as the format demands
    (github.com/huggingface/safetensors). Reads the header only. Raises StartupError, which names the file.
    """
    return [*tensors_in(path)]


def tensors_in(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Check the header of a safetensors file as `tensor_names` does, and return type and shape of each tensor."""
    try:
        header = _checked_header(path)
        return {name: (tensor["dtype"], tensor["shape"]) for name, tensor in header.items()}
    except (ValueError, RecursionError, OSError) as error:
        why = "its header is nested too deeply" if isinstance(error, RecursionError) else error
        raise StartupError(
            f"{path} is not a valid safetensors file: {why}. Download or convert the model again"
        ) from error


def _checked_header(path: Path) -> dict[str, Any]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        data_bytes = file_bytes - _LENGTH_BYTES - header_bytes
        if header_bytes > _MOST_HEADER_BYTES or data_bytes < 0:
            raise ValueError(f"its header would have {header_bytes} bytes, but the file has {file_bytes}")
        # Decoded first: json would guess at other encodings.
        text = file.read(header_bytes).decode()
    header = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")  # noqa: TRY004 - the file is wrong, not the caller
    metadata = header.pop(_METADATA, None)
    # MLX writes null if there is no metadata.
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ValueError(f"its {_METADATA} has values that are not strings")
    spans = sorted((*_span(name, tensor), name) for name, tensor in header.items())
    end_of_last = 0
    for begin, end, name in spans:
        if begin != end_of_last:
            raise ValueError(f"tensor {_shown(name)} begins at byte {begin}, but the one before ends at {end_of_last}")
        end_of_last = end
    if end_of_last != data_bytes:
        raise ValueError(f"its tensors take {end_of_last} bytes, but the file holds {data_bytes} for them")
    return header


def _span(name: str, tensor: Any) -> tuple[int, int]:
    """Return the begin and the end of a tensor's data. Raises ValueError unless the entry is valid."""
    if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {_shown(name)} has other entries than dtype, shape and data_offsets")
    dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ValueError(f"tensor {_shown(name)} has the type {_shown(dtype)}, which MLX does not load")
    if not _are_numbers(shape, _LARGEST_DIMENSION) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"tensor {_shown(name)} has the invalid shape {_shown(shape)}")
    if not _are_numbers(offsets, 2**63) or len(offsets) != 2:
        raise ValueError(f"tensor {_shown(name)} has the invalid data_offsets {_shown(offsets)}")
    begin, end = offsets
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != num_bytes:
        raise ValueError(f"tensor {_shown(name)} takes {num_bytes} bytes, but its data_offsets span {end - begin}")
    return begin, end


def _are_numbers(values: Any, most: int) -> bool:
    # `type`, because True is an int.
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= most for value in values)


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"its header has {_shown(name)} twice")
        entries[name] = value
    return entries


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"its header has the invalid number {name}")


def _shown(value: object) -> str:
    """Return a value for an error message: escaped, and cut to a bounded length."""
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]} …"
