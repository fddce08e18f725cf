"""Chat templates of published models, which llama.cpp collects for its own tests.

They come with the source of a package of the Python index, into the user's cache.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path, PurePosixPath

from tests.published_packages import download, kept

PACKAGE = "llama-cpp-python==0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_FOLDER = "vendor/llama.cpp/models/templates"
_CACHED = "published-templates-1.json"


def find_templates() -> dict[str, str]:
    """Return the templates by their names. Raises CannotBeHadError."""
    templates: dict[str, str] = json.loads(kept(_CACHED, _make).read_text())
    return templates


def _make(file: Path) -> None:
    templates = {}
    with tarfile.open(download(PACKAGE, sha256=SDIST_SHA256, directory=file.parent, is_source=True)) as files:
        for member in files:
            path = PurePosixPath(member.name)
            if path.suffix == ".jinja" and str(path.parent).endswith(_FOLDER):
                content = files.extractfile(member)
                assert content is not None
                templates[path.stem] = content.read().decode()
    file.write_text(json.dumps(templates))
