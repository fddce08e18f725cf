"""Counters of a process, and its memory."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from specd.cli.supervisor import Child


async def counters(child: Child) -> dict[str, float]:
    """Return the metrics of a process that have no labels, by name without `specd_` and `_total`. Raises OSError."""

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{child.facts['metrics_address']}/metrics", timeout=10) as response:
            text: str = response.read().decode()
            return text

    return {
        sample.name.removeprefix("specd_").removesuffix("_total"): sample.value
        for family in text_string_to_metric_families(await asyncio.to_thread(scrape))
        for sample in family.samples
        if not sample.labels
    }


def resident_mib(child: Child) -> float:
    """Return the resident memory of a process."""
    listing = subprocess.run(["ps", "-o", "rss=", "-p", str(child.pid)], capture_output=True, check=True)
    return int(listing.stdout) / 1024
