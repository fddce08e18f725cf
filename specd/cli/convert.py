"""The command `specd convert`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from specd.launch import check_servers_are_installed, start_logging
from specd.worker.model.outline import check_conversion


class Dtype(StrEnum):
    """Precisions of weights."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Bits(StrEnum):
    """Bits of a quantised weight."""

    FOUR = "4"
    EIGHT = "8"


class GroupSize(StrEnum):
    """Weights that share a scale."""

    G32 = "32"
    G64 = "64"
    G128 = "128"


def convert(
    source: Annotated[str, typer.Argument(metavar="REPO_OR_DIR", help="Hugging Face repository or directory.")],
    out: Annotated[Path, typer.Argument(help="Directory to create.")],
    quantize: Annotated[
        Bits | None, typer.Option("--quantize", "-q", help="Bits of a quantised weight. (default: not quantised)")
    ] = None,
    group_size: Annotated[GroupSize, typer.Option(help="With --quantize: weights that share a scale.")] = GroupSize.G64,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Precision of the weights that are not quantised. (default: as stored)")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Compare a few tokens with transformers, if PyTorch is installed."),
    ] = True,
) -> None:
    """Write a model in another precision, or quantised, as safetensors.

    Pickle weights (pytorch_model.bin) need PyTorch, which loads only tensors from them: pip install
    'specd[convert]'.
    """
    check_servers_are_installed()
    check_conversion(source, out)  # before the import of MLX, which takes a second
    start_logging("convert")
    from specd.worker.model.conversion import convert as convert_model

    found = convert_model(
        source,
        out,
        bits=int(quantize) if quantize else None,
        group_size=int(group_size),
        dtype=dtype,
        check=check,
        progress=_progress,
    )
    size = sum(path.stat().st_size for path in out.iterdir())
    typer.echo(f"wrote {out} ({size / 1e6:,.1f} MB); {found}")


def _progress(items: Sequence[Any], title: str) -> Iterable[Any]:
    return track(items, description=title)
