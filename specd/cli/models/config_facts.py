"""Facts in the config of a model, which is a stranger's file: any value can have any type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specd.cli.models.places import printable
from specd.worker.model.files import POSITIONS

_DTYPES = ("torch_dtype", "dtype")
_LONGEST = 40


def family(config: Mapping[str, Any]) -> str | None:
    """Return the family of a model, such as llama."""
    value = config.get("model_type")
    return printable(value, _LONGEST) if isinstance(value, str) else None


def quantisation(config: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return the precision of a model's weights for people, such as "4-bit affine", and its bits if it is quantised."""
    own = config.get("quantization")
    if isinstance(own, dict) and type(bits := own.get("bits")) is int:
        others = {each["bits"] for each in own.values() if isinstance(each, dict) and type(each.get("bits")) is int}
        mixed = f", parts {'/'.join(map(str, sorted(others - {bits})))}-bit" if others - {bits} else ""
        return f"{bits}-bit {printable(own.get('mode', 'affine'), _LONGEST)}{mixed}", bits
    other = config.get("quantization_config")
    if isinstance(other, dict):
        bits = other.get("bits") if type(other.get("bits")) is int else None
        method = printable(other.get("quant_method", "quantised"), _LONGEST)
        return f"{bits}-bit {method}" if bits else method, bits
    for values in (config, _text(config)):
        for name in _DTYPES:
            if isinstance(dtype := values.get(name), str):
                return printable(dtype.removeprefix("torch."), _LONGEST), None
    return None, None


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a session that the config tells."""
    value = _text(config).get(POSITIONS)
    return value if type(value) is int and value > 0 else None


def item_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a number in a cache on a GPU, where it has the precision of the model."""
    return 4 if any(values.get(name) == "float32" for values in (config, _text(config)) for name in _DTYPES) else 2


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config") or config
    return text if isinstance(text, dict) else config
