"""The link to a worker, also while the worker is away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.workers import connection
from coordinator.workers.connection import WorkerConnection
from coordinator.workers.link import WorkerLink
from coordinator.workers.session_calls import verify_calls
from specd.identity.authority import Authority, standard_leaves
from specd.identity.certificates import CertificateFiles, Certificates
from specd.identity.roles import Role


async def test_a_new_certificate_that_waits_for_its_worker_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again for the next new one: nothing is at the worker's address, for dozens of tries."""
    monkeypatch.setattr(connection, "RENEW_SECONDS", 0.01)
    authority = Authority.create(tmp_path / "certs")
    (leaf,) = (leaf for leaf in standard_leaves([]) if leaf.role is Role.COORDINATOR)
    names = ("coordinator.crt", "coordinator.key", "ca.crt")
    files = CertificateFiles(*(tmp_path / "certs" / name for name in names))
    authority.issue(leaf, days=30, replace=False)
    tries = 0

    async def never(*_: object) -> None:
        """Nothing is accepted, and nothing changes."""

    def refresh(certificates: Certificates) -> None:
        nonlocal tries
        tries += 1
        read_again(certificates)

    read_again = Certificates.refresh
    monkeypatch.setattr(Certificates, "refresh", refresh)
    with capture_logs() as logs:
        link: WorkerLink[object] = WorkerLink(
            WorkerConnection("target", "127.0.0.1:1", Certificates(files, role=Role.COORDINATOR)),
            calls=verify_calls(),
            open_stream=lambda *_: object(),
            accept=never,
            on_change=never,
        )
        try:
            for number in (1, 2):
                authority.issue(leaf, days=30 + number, replace=True)
                tries = 0
                async with asyncio.timeout(20):
                    while tries < 30:  # noqa: ASYNC110 - the link raises no event
                        await asyncio.sleep(0.01)
                warnings = [entry for entry in logs if "refuses the new certificate" in entry["event"]]
                assert len(warnings) == number
        finally:
            await link.close()
