"""The directories of adapters, which are untrusted input: checks before a model is loaded for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specd.adapter_settings import split_adapters
from specd.model_info import public_name_of
from specd.startup_error import StartupError
from specd.worker.model.files import check_plain_files, read_object
from specd.worker.model.fingerprint import FileState
from specd.worker.model.safetensors_file import tensors_in

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
# The two matrices of a low-rank layer, by the last part of a tensor's name.
_FIRST, _SECOND = "lora_a", "lora_b"
_LARGEST_RANK = 4096
_TAKES_WHOLE_MODELS = "specd serves adapters of the type 'lora'; merge this one into its model with mlx_lm.fuse"


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter's directory, after its checks: the paths of its layers, and the states of its files at that time."""

    name: str
    directory: Path
    num_layers: int
    layers: tuple[str, ...]
    files: tuple[FileState, ...]

    def wrong(self, why: object) -> StartupError:
        """Return the error of an adapter that cannot be served."""
        return StartupError(f"the adapter {self.name} in {self.directory} cannot be served: {why}")


def read_adapters(adapters: str, model: str) -> list[AdapterFiles]:
    """Return the adapters of a model, of NAME=DIR with commas between them.

    Their configs and the headers of their weights are read. Raises StartupError.
    """
    found = []
    for name, directory in split_adapters(adapters).items():
        if name == public_name_of(model):
            raise StartupError(f"the adapter {name} has the name of its model: give it another one")
        found.append(_read(name, Path(directory).expanduser()))
    return found


def _read(name: str, directory: Path) -> AdapterFiles:
    if not directory.is_dir():
        raise StartupError(f"the adapter {name}: {directory} is not a directory: name the one with {CONFIG}")
    missing = [file for file in (CONFIG, WEIGHTS) if not (directory / file).is_file()]
    if missing:
        is_of_peft = (directory / "adapter_model.safetensors").is_file()
        remedy = "it is one of PEFT: convert it for mlx-lm" if is_of_peft else "name a directory that mlx_lm.lora wrote"
        raise StartupError(f"the adapter {name}: {directory} has no {' and no '.join(missing)}: {remedy}")
    check_plain_files(directory, [directory / CONFIG, directory / WEIGHTS])
    states = tuple(FileState.of(directory / file) for file in (CONFIG, WEIGHTS))
    config, tensors = read_object(directory / CONFIG), tensors_in(directory / WEIGHTS)
    adapter = AdapterFiles(name, directory, _number_of_layers(config), _layers_of(tensors), states)
    if wrong := _fault_of(config) or _fault_of_tensors(tensors):
        raise adapter.wrong(wrong)
    return adapter


def _number_of_layers(config: Mapping[str, Any]) -> int:
    count = config.get("num_layers")
    return count if isinstance(count, int) else 0


def _layers_of(tensors: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted({name.rpartition(".")[0] for name in tensors}))


def _fault_of(config: Mapping[str, Any]) -> str:
    """Return the reason, for people, that a config cannot be used; "" if it can."""
    kind, parameters = config.get("fine_tune_type", "lora"), config.get("lora_parameters")
    if kind != "lora":
        return f"its fine_tune_type is {kind!a}: {_TAKES_WHOLE_MODELS}"
    if not isinstance(parameters, dict):
        return f"lora_parameters is {parameters!a} in {CONFIG}: it must be an object with rank, scale and dropout"
    values = {"num_layers": config.get("num_layers"), **parameters}
    keys = values.get("keys")
    for name, is_right, must_be in (
        ("num_layers", _is_number(values["num_layers"], -1, 2**31, whole=True), "a number of layers, or -1 for all"),
        ("rank", _is_number(values.get("rank"), 1, _LARGEST_RANK, whole=True), f"in [1, {_LARGEST_RANK}]"),
        ("scale", _is_number(values.get("scale"), -1e6, 1e6), "a number (mlx-lm reads no 'alpha')"),
        ("dropout", _is_number(values.get("dropout"), 0, 0.999), "in [0, 1)"),
        ("keys", keys is None or _are_names(keys), "a list of names of layers"),
    ):
        if not is_right:
            return f"{name} is {values.get(name)!a} in {CONFIG}: it must be {must_be}"
    return ""


def _fault_of_tensors(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """Return the reason, for people, that weights cannot be those of low-rank layers; "" if they can."""
    if not tensors:
        return f"{WEIGHTS} has no tensors"
    for name in tensors:
        layer, _, last = name.rpartition(".")
        if last not in (_FIRST, _SECOND):
            return f"{WEIGHTS} has {name!a}, which is no part of a low-rank layer: {_TAKES_WHOLE_MODELS}"
        other = f"{layer}.{_SECOND if last == _FIRST else _FIRST}"
        if other not in tensors:  # mlx-lm would leave it as it was initialised, at random
            return f"{WEIGHTS} has {name!a}, but not {other!a}"
    return ""


def _is_number(value: Any, least: float, most: float, *, whole: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return False
    return bool(math.isfinite(value) and least <= value <= most)


def _are_names(keys: Any) -> bool:
    return isinstance(keys, list) and all(isinstance(key, str) for key in keys)
