"""Chat templates of published models, which llama.cpp collects for its own tests.

They come with the source of a package of the Python index, into the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from specd.user_cache import taking_turns, user_cache_directory

PACKAGE = "llama-cpp-python==0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_FOLDER = "vendor/llama.cpp/models/templates"
_CACHED = "published-templates-1"


class CannotBeHadError(Exception):
    """There is no index to download the package from, or no cache to keep the templates in."""


def find_templates() -> dict[str, str]:
    """Return the templates by their names. Raises CannotBeHadError."""
    cache = user_cache_directory()
    if cache is None:
        raise CannotBeHadError("there is no cache directory that can be written")
    file = cache / f"{_CACHED}.json"
    with taking_turns(_CACHED, timeout_seconds=600):
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=cache) as temporary:
                made = Path(temporary) / file.name
                made.write_text(json.dumps(_download(Path(temporary))))
                made.rename(file)
    templates: dict[str, str] = json.loads(file.read_text())
    return templates


def _download(directory: Path) -> dict[str, str]:
    # pip asks the package for its metadata, which takes most of a minute.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    done = subprocess.run([*pip, "--dest", directory, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBeHadError(f"pip cannot download {PACKAGE}: {done.stderr.strip()[-300:]}")
    (sdist,) = directory.glob("*.tar.gz")
    with sdist.open("rb") as archive:
        digest = hashlib.file_digest(archive, "sha256").hexdigest()
    assert digest == SDIST_SHA256, f"{PACKAGE} of this index is another one: its SHA-256 is {digest}"
    templates = {}
    with tarfile.open(sdist) as files:
        for member in files:
            path = PurePosixPath(member.name)
            if path.suffix == ".jinja" and str(path.parent).endswith(_FOLDER):
                content = files.extractfile(member)
                assert content is not None
                templates[path.stem] = content.read().decode()
    return templates
