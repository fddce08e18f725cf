"""Loads a fast BLAS before MLX, on platforms where MLX does not have one.

MLX's CPU wheel for Linux bundles the reference BLAS, whose matrix product of M rows costs M times that of one row:
verifying k + 1 tokens then costs k + 1 decodes and speculation loses. libmlx looks its `cblas_*` functions up in the
global scope first, so an OpenBLAS opened there before the first `import mlx.core` takes their place.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from specd.errors import StartupError
from specd.user_cache import user_cache_directory

_PREFIX = "scipy_"  # on every symbol of the wheel's library
# The processors, by OpenBLAS's names of kernels, for which it has a product without packing; all have AVX-512.
_CORES_WITH_SMALL_PRODUCTS = {"SkylakeX", "Cooperlake", "SapphireRapids"}

# Some Arm processors have the matrix extension SME, such as Apple's M4, also in virtual machines. OpenBLAS's kernels
# for SME compute wrong products (issues 5528 and 5873; 0.3.34, emulated). The kernels of this older processor do not.
_AT_HWCAP2, _HWCAP2_SME = 26, 1 << 23
_CORE_INSTEAD_OF_SME = "NEOVERSEN1"
# Rows, columns and depth of the products that check the kernels.
_PRODUCTS = ((1, 64, 16), (4, 64, 300), (33, 513, 300))
_ROW_MAJOR, _NOT_TRANSPOSED = 101, 111  # from cblas.h

_INSTALL = "install the package scipy-openblas32 or libopenblas0-pthread"

log = structlog.get_logger()


@dataclass
class _Loaded:
    """The BLAS of this process: `description` is for people, `core` is the processor of its kernels.

    Without a library it is MLX's own BLAS, or Apple's.
    """

    description: str = ""
    library: ctypes.CDLL | None = None
    core: str = ""
    num_threads: int = 1
    keeps_to_one_thread: bool = False


_LOADED = _Loaded()


def load_blas(num_threads: int) -> str:
    """Make MLX use OpenBLAS with this many threads, on Linux; on macOS MLX uses Accelerate.

    Returns a description of the library, for people. Must run before the first import of `mlx.core` in the process.
    Raises StartupError if its products are wrong.
    """
    if sys.platform != "linux":
        return "Accelerate"
    if not _LOADED.description:
        if "mlx.core" in sys.modules:
            raise RuntimeError("load_blas() must run before the first import of mlx.core")
        _LOADED.description = _load_openblas(num_threads)
    return _LOADED.description


def num_threads() -> int:
    """Return the number of threads of BLAS."""
    return _LOADED.num_threads


def use_threads(count: int) -> None:
    """Compute products with this many threads from now on, at most the number that OpenBLAS was loaded with."""
    if _LOADED.library is not None:
        _LOADED.num_threads = count
        _set_num_threads(count)


def core() -> str:
    """Return OpenBLAS's name of the processor of its kernels, or "" without OpenBLAS."""
    return _LOADED.core


def has_small_products() -> bool:
    """Return whether BLAS has a kernel for small float32 products, which reads its operands in place."""
    return _LOADED.core in _CORES_WITH_SMALL_PRODUCTS


def keep_to_one_thread() -> None:
    """Compute each product on its calling thread from now on.

    A product that BLAS shares out waits for all threads. If the other worker computes on one of their cores, a thread
    waits for its next turn there, which takes longer than most products.
    """
    _set_num_threads(1)
    _LOADED.keeps_to_one_thread = True


def use_all_threads() -> None:
    """Share out products to the threads of BLAS again."""
    _set_num_threads(_LOADED.num_threads)
    _LOADED.keeps_to_one_thread = False


def keeps_to_one_thread() -> bool:
    """Return whether each product is computed on one thread, so that products on several streams run side by side."""
    return _LOADED.keeps_to_one_thread


def _set_num_threads(count: int) -> None:
    assert _LOADED.library is not None
    _LOADED.library.openblas_set_num_threads(count)


def _load_openblas(num_threads: int) -> str:
    _LOADED.num_threads = num_threads
    os.environ["OPENBLAS_NUM_THREADS"] = str(num_threads)  # the library reads it when it is loaded
    # By default idle threads spin for 2^26 cycles and take the core of the other worker. 2^4 measured no slower.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    if _has_sme():
        os.environ.setdefault("OPENBLAS_CORETYPE", _CORE_INSTEAD_OF_SME)
    problems: list[Exception] = []
    for load in (_load_wheel_library, _load_system_library):
        try:
            library = load()
            library.openblas_get_config.restype = ctypes.c_char_p
            library.openblas_get_corename.restype = ctypes.c_char_p
            _LOADED.library, _LOADED.core = library, library.openblas_get_corename().decode()
            _check_products(library, _LOADED.core)
            version = " ".join(library.openblas_get_config().decode().split()[:2])
            return f"{version} for {_LOADED.core}, {library.openblas_get_num_threads()} threads"
        except (ImportError, OSError, AttributeError) as error:
            problems.append(error)
    is_installed = not isinstance(problems[0], ImportError)  # PackageNotFoundError is an ImportError
    advice = "find out why the installed package scipy-openblas32 cannot be loaded" if is_installed else _INSTALL
    log.warning(
        "OpenBLAS cannot be loaded, so MLX uses its bundled reference BLAS, and speculative decoding will be SLOWER "
        f"than the target alone; {advice}",
        problems=[*map(str, problems)],
    )
    return "reference BLAS (slow)"


def _has_sme() -> bool:
    """Return whether the kernel reports an Arm processor with SME."""
    if platform.machine() != "aarch64":
        return False
    system = ctypes.CDLL(None)
    system.getauxval.restype = ctypes.c_ulong
    return bool(system.getauxval(_AT_HWCAP2) & _HWCAP2_SME)


def _check_products(library: ctypes.CDLL, core: str) -> None:
    """Raise StartupError if the library computes wrong products of small whole numbers, which are exact in float32."""
    for rows, columns, depth in _PRODUCTS:
        left, right = (np.arange(n * m).reshape(n, m) % 7 for n, m in ((rows, depth), (depth, columns)))
        a, b, product = left.astype(np.float32), right.astype(np.float32), np.zeros((rows, columns), np.float32)
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        library.cblas_sgemm(
            *(_ROW_MAJOR, _NOT_TRANSPOSED, _NOT_TRANSPOSED, rows, columns, depth),
            *(one, a.ctypes, depth, b.ctypes, columns, zero, product.ctypes, columns),
        )
        if not np.array_equal(product, left @ right):
            raise StartupError(
                f"OpenBLAS computes wrong products with its kernels for {core} on this processor: set the variable "
                "OPENBLAS_CORETYPE to other kernels, such as NEOVERSEN1 on Arm or HASWELL on x86"
            )


def _load_wheel_library() -> ctypes.CDLL:
    """Load the OpenBLAS of the wheel `scipy-openblas32`, from a copy whose symbols have lost their prefix.

    The copy is kept for the next start. If it cannot be written, as on a full disk, it is made in memory. LIEF renames
    the symbols, and not patchelf, because all dependencies have permissive licences.
    """
    version = importlib.metadata.version("scipy-openblas32")
    directory = user_cache_directory()
    name = f"openblas-{version}-{platform.machine()}"
    for kept in directory.glob(f"{name}-*.so") if directory is not None else ():
        try:
            # The name ends with the size, because loading a truncated library ends the process.
            if kept.name == f"{name}-{kept.stat().st_size}.so":
                return ctypes.CDLL(str(kept), mode=ctypes.RTLD_GLOBAL)
            error = "its size is wrong"
        except OSError as raised:
            error = str(raised)
        log.warning("the copy of OpenBLAS is damaged: making a new one", path=str(kept), error=error)
        kept.unlink(missing_ok=True)
    with _copy_in_memory() as made:
        if directory is not None:
            try:
                kept = _keep(made, directory, name)
                return ctypes.CDLL(str(kept), mode=ctypes.RTLD_GLOBAL)
            except OSError as raised:
                log.warning(
                    "cannot keep a copy of OpenBLAS in the cache directory: each start makes one in memory",
                    directory=str(directory),
                    error=str(raised),
                )
        return ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


def _keep(made: Path, directory: Path, name: str) -> Path:
    """Write a copy to a directory, and return its path. Raises OSError, and leaves nothing, if there is no space."""
    # Written under another name and renamed, so that two workers that start together never read half a file.
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".partial", delete=False) as file:
        partial = Path(file.name)
    try:
        shutil.copyfile(made, partial)
        size = made.stat().st_size
        if partial.stat().st_size != size:
            raise OSError(f"{partial} has {partial.stat().st_size} bytes, not {size}")
        return partial.rename(directory / f"{name}-{size}.so")
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _copy_in_memory() -> Iterator[Path]:
    """Make the copy in a file in memory, and return its path. On a disk, LIEF would not report that it is full."""
    descriptor = os.memfd_create("libopenblas.so")
    try:
        path = Path(f"/proc/self/fd/{descriptor}")
        _copy_without_prefix(path)
        yield path
    finally:
        os.close(descriptor)


def _copy_without_prefix(copy: Path) -> None:
    import lief
    import scipy_openblas32

    source = Path(scipy_openblas32.get_lib_dir()) / scipy_openblas32.get_library(fullname=True)
    library = lief.ELF.parse(str(source))
    if library is None:
        raise OSError(f"{source} is not an ELF library")
    for symbol in library.dynamic_symbols:
        symbol.name = str(symbol.name).removeprefix(_PREFIX)
    library.write(str(copy))


def _load_system_library() -> ctypes.CDLL:
    name = ctypes.util.find_library("openblas")
    if name is None:
        raise OSError("the system has no libopenblas")
    return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
