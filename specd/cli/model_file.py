"""The file of models of `specd up --models`: their names, and how each is served."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from specd.settings import DraftWorkerSettings, TargetWorkerSettings, WorkerSettings
from specd.settings_file import suggestion
from specd.startup_error import StartupError
from specd.up_settings import UpSettings
from specd.wrong_value import wrong_value

# The settings of a worker that the supervisor chooses.
_CHOSEN = frozenset(
    ("model", "listen", "metrics_listen", "self_draft", "adapters", "ranks", "rank", "follow", "ranks_listen")
)

_IDLE_SECONDS = 900.0
IdleSeconds = Annotated[float, Field(gt=0)]


class ModelTable(BaseModel):
    """A model in the file: the settings of `specd up` for one model, its place in the memory, and its workers'."""

    model_config = ConfigDict(extra="forbid")

    target: str = Field(min_length=1)
    draft: str = UpSettings.model_fields["draft"].default
    draft_dirs: str = ""
    draft_in_target: bool = False
    target_adapters: str = ""
    draft_adapters: str = ""
    targets: int = 1
    target_ranks: int = 1
    pinned: bool = False
    idle_seconds: IdleSeconds | None = None
    target_worker: dict[str, Any] = Field(default_factory=dict, alias="target-worker")
    draft_worker: dict[str, Any] = Field(default_factory=dict, alias="draft-worker")


def of_one_model() -> list[str]:
    """Return the settings of `specd up` that are those of one model, so that a table has them."""
    return [name for name in UpSettings.model_fields if name in ModelTable.model_fields]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    budget: Annotated[ByteSize, Field(gt=0)] | None = None
    idle_seconds: IdleSeconds = _IDLE_SECONDS
    models: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ModelFile:
    """The models by name, the default one first, and the memory for those that are loaded; None if it is not given."""

    models: dict[str, ModelTable]
    budget_bytes: int | None = None
    idle_seconds: float = _IDLE_SECONDS

    def idle_seconds_of(self, name: str) -> float:
        """Return the time after which a model without requests is unloaded."""
        table = self.models[name]
        return math.inf if table.pinned else table.idle_seconds or self.idle_seconds


def read_model_file(path: Path) -> ModelFile:
    """Return the models in a file, or those of a directory: each of its directories that has a config.json.

    Raises StartupError.
    """
    if path.is_dir():
        return _read_directory(path)
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the file of models {path}: {error}") from error
    file = _checked(_File, content, f"the file of models {path}")
    if not file.models:
        raise StartupError(f"the file of models {path} has no model: add a table such as [models.coder]")
    models = {name: _table(name, values, path) for name, values in file.models.items()}
    return ModelFile(models, file.budget, file.idle_seconds)


def _read_directory(path: Path) -> ModelFile:
    found = sorted(each for each in path.iterdir() if (each / "config.json").is_file())
    if not found:
        raise StartupError(f"the directory of models {path} has no directory with a config.json")
    return ModelFile({each.name: ModelTable(target=str(each)) for each in found})


def _table(name: str, values: dict[str, Any], path: Path) -> ModelTable:
    where = f"[models.{name}] in {path}"
    table = _checked(ModelTable, values, where)
    workers: tuple[tuple[str, dict[str, Any], type[WorkerSettings]], ...] = (
        ("target-worker", table.target_worker, TargetWorkerSettings),
        ("draft-worker", table.draft_worker, DraftWorkerSettings),
    )
    for worker, own, settings in workers:
        known = settings.model_fields.keys() - _CHOSEN
        if unknown := [each for each in own if each not in known]:
            raise StartupError(f"{where}: {worker} has no {unknown[0]!r}{suggestion(unknown[0], known)}")
    return table


TableT = TypeVar("TableT", bound=BaseModel)


def _checked(cls: type[TableT], values: dict[str, Any], where: str) -> TableT:
    known = [each.alias or name for name, each in cls.model_fields.items()]
    if unknown := [name for name in values if name not in known]:
        raise StartupError(f"{where} has no {unknown[0]!r}{suggestion(unknown[0], known)}")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(wrong_value(".".join(map(str, each["loc"])), each) for each in error.errors())
        raise StartupError(f"{where}: {problems}") from error
