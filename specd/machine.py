"""Resources of this machine for a process: CPUs, threads, memory."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specd.startup_error import StartupError

# MLX's parts for CUDA, as packages.
_CUDA_WHEELS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
_NVIDIA_SECONDS = 5.0


def part_of_memory(divisor: int) -> Any:
    """Return a fraction of the machine's memory, as --help shows it."""
    return f"{total_memory() // divisor // 2**20}MiB"


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's memory, or the limit of its cgroup."""
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([of_machine, *(limit for limit, _ in _memory_limits(root))])


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can still get without any process being killed or swapped."""
    import psutil  # which only workers need

    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _memory_limits(root))])


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Return limit and use in bytes, without droppable files, of each memory group (v2 or v1) with a limit."""
    for group in _cgroups(root, "memory"):
        with contextlib.suppress(OSError, ValueError):  # no limit is "max"
            is_v2 = (group / "memory.max").is_file()
            limit = (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).read_text()
            used = (group / ("memory.current" if is_v2 else "memory.usage_in_bytes")).read_text()
            # The last match (v1: total_inactive_file) includes the groups below this one, as the use does.
            *_, files = re.findall(
                r"^(?:total_)?inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE
            )
            yield int(limit), int(used) - int(files)


def available_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use: by affinity, and by the quota of its cgroup (v2 or v1)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _cgroups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            if (group / "cpu.max").is_file():
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            # Rounded up: 1.5 CPUs keep two threads busy most of the time. No quota is "max", or -1.
            if quota != "max" and int(quota) > 0:
                count = min(count, -(-int(quota) // int(period)))
    return count


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Return the directories of this process's groups for a controller, and of their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = Path(path.lstrip("/"))
            yield from (mount / each for each in (group, *group.parents))


def given_blas_threads() -> int | None:
    """Return OPENBLAS_NUM_THREADS, if it is set. Raises StartupError if its value is not a number of threads."""
    given = os.environ.get("OPENBLAS_NUM_THREADS") or ""
    if given and not (re.fullmatch("[0-9]{1,4}", given) and int(given) > 0):
        raise StartupError(f"OPENBLAS_NUM_THREADS is {given!r}: it must be a number of threads, at least 1")
    return int(given) if given else None


def default_blas_threads() -> int:
    """Return OPENBLAS_NUM_THREADS, or one thread per CPU."""
    with contextlib.suppress(StartupError):  # the settings that have this default report it
        return given_blas_threads() or available_cpus()
    return available_cpus()


def nvidia_gpus(root: Path = Path("/")) -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    directory = root / "proc/driver/nvidia/gpus"
    return [str(i) for i in range(len(list(directory.iterdir())))] if directory.is_dir() else []


def gpu_of(index: int, num_targets: int) -> dict[str, str]:
    """Return the environment that gives one of several targets its own NVIDIA GPU, if there are any."""
    gpus = nvidia_gpus() if num_targets > 1 else []
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}


def has_gpu() -> bool:
    """Return whether MLX computes on a GPU here, without importing it: on a Mac, or with its wheel for CUDA."""
    return sys.platform == "darwin" or (bool(nvidia_gpus()) and any(map(_is_installed, _CUDA_WHEELS)))


def model_memory() -> int | None:
    """Return the bytes of memory in which models can lie, those of all NVIDIA GPUs together; None if it is unknown."""
    if sys.platform == "darwin" or not has_gpu():
        return total_memory()
    query = [
        "nvidia-smi",
        "--query-gpu=memory.total",
        "--format=csv,noheader,nounits",
        f"--id={','.join(nvidia_gpus())}",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SECONDS, check=True)
        return sum(int(line) * 2**20 for line in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):  # a GPU that shares the machine's memory has no number
        return None


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
