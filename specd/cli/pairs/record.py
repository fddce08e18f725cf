"""Measurements of a target and its drafts, kept in the user's cache by target, device and versions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from specd.cli.pairs.candidates import Candidate
from specd.machine import has_gpu, nvidia_gpus
from specd.pair_worth import DraftTrial, TargetTrial
from specd.user_cache import user_cache_directory
from specd.version import __version__

_MOST_BYTES = 1 << 22
_VERSION = "2"  # increased when trials measure something else
_PACKAGES = ("mlx", "mlx-lm")


@dataclass(frozen=True)
class PairRecord:
    """The trials of a target.

    `listing` is a digest of the models that were on this machine, and `fitting` the candidates among them: while the
    listing is the same, so are they. `target` is as the trial process wrote it, with the target's texts; it is empty
    before the first trial. `drafts` are trials by the key of a candidate.
    """

    listing: str = ""
    fitting: Sequence[Candidate] = ()
    target: Mapping[str, Any] = field(default_factory=dict)
    drafts: Mapping[str, DraftTrial] = field(default_factory=dict)

    @property
    def target_trial(self) -> TargetTrial | None:
        """The measurements of the target alone, None before its trial."""
        return TargetTrial.restored(self.target) if self.target else None

    def missing(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates without a trial."""
        return [each for each in candidates if each.key not in self.drafts]

    @classmethod
    def kept_in(cls, path: Path | None) -> Self:
        """Return the record in a file, or an empty one without a usable file."""
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            if path is not None and path.stat().st_size <= _MOST_BYTES:
                content = json.loads(path.read_text())
                record = cls(
                    str(content["listing"]),
                    [Candidate(**each) for each in content["fitting"]],
                    dict(content["target"]),
                    {str(key): DraftTrial.restored(each) for key, each in content["drafts"].items()},
                )
                if record.target_trial is not None or not record.drafts:
                    return record
        return cls()

    def keep(self, path: Path | None) -> None:
        """Keep the record in a file, if there is one. A disk that is full only costs the next start a trial."""
        if path is None:
            return
        content = {
            "listing": self.listing,
            "fitting": [asdict(each) for each in self.fitting],
            "target": self.target,
            "drafts": {key: each.as_record() for key, each in self.drafts.items()},
        }
        partial = path.with_suffix(f".{os.getpid()}")  # renamed when it is whole: another start may read it now
        try:
            partial.write_text(json.dumps(content))
            partial.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def record_path(target_fingerprint: str, threads: Mapping[str, int]) -> Path | None:
    """Return the file with the trials of a target on this device, with these versions; None without a cache."""
    directory = user_cache_directory()
    if directory is None:
        return None
    machine = (platform.machine(), os.cpu_count(), has_gpu(), nvidia_gpus(), sorted(threads.items()))
    versions = (_VERSION, __version__, *map(_version_of, _PACKAGES))
    digest = hashlib.sha256(repr((target_fingerprint, machine, versions)).encode()).hexdigest()
    return directory / f"pair-{digest[:24]}.json"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
