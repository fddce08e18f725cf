"""The reports of a download to the supervisor."""

from __future__ import annotations

from typing import Any

import pytest

from specd.worker.model import directory


def test_bytes_are_told_and_nothing_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[dict[str, Any]] = []

    def tell(**facts: Any) -> bool:
        told.append(facts)
        return True

    monkeypatch.setattr(directory, "tell_supervisor", tell)
    bars = directory._progress_bar()
    with bars(total=3, desc="Fetching 3 files") as files, bars(total=0, unit="B", unit_scale=True) as received:
        received.total = 1000
        received.update(400)
        received.refresh()
        files.update(1)
    assert told[0] == {"stage": "looking up"}
    assert {"stage": "downloading", "done": 400, "total": 1000} in told
    assert {each["stage"] for each in told} == {"looking up", "downloading"}
    assert capsys.readouterr() == ("", "")


def test_without_a_supervisor_the_hub_draws_its_own() -> None:
    assert directory._progress_bar() is None
