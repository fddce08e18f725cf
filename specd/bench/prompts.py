"""The code prompts that come with specd."""

from __future__ import annotations

from pathlib import Path

from specd.errors import StartupError


def load_prompts(directory: Path | None = None) -> dict[str, str]:
    """Return the prompts of a directory, a file each, by file name; without one, those that come with specd.

    Raises StartupError when there is none.
    """
    packaged = Path(__file__).parent / "prompts"
    here = packaged if packaged.is_dir() else Path(__file__).parents[2] / "benchmarks" / "prompts"
    files = sorted(path for path in (directory or here).iterdir() if path.is_file())
    if not files:
        raise StartupError(f"there is no prompt in {directory or here}: put one into a file each")
    return {path.name: path.read_text() for path in files}
