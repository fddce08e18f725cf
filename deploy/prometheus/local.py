"""A Prometheus on this machine with the configuration that is shipped, for tests."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

SHIPPED = Path(__file__).parent

_START_SECONDS = 30.0

# A series as the API of Prometheus has it: `metric`, its labels; `value` or `values`, pairs of time and text.
Series = dict[str, Any]


class LocalPrometheus:
    """Debian's `prometheus`, as an async context manager, on a copy of the configuration.

    Only what must be is other than shipped: where the targets are, and how often they are scraped and rules evaluated.
    """

    def __init__(self, addresses: Mapping[str, str], *, interval_seconds: int) -> None:
        """Scrape the processes whose metrics are at these addresses, by job, so often."""
        self.interval_seconds = interval_seconds
        self._directory = tempfile.TemporaryDirectory(prefix="specd-prometheus-")
        self._process: asyncio.subprocess.Process | None = None
        self._address = f"127.0.0.1:{_free_port()}"
        self._num_targets = len(addresses)
        self._write_configuration(Path(self._directory.name), addresses)

    def _write_configuration(self, directory: Path, addresses: Mapping[str, str]) -> None:
        shutil.copytree(SHIPPED / "rules", directory / "rules")
        interval = f"{self.interval_seconds}s"
        configuration = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
        configuration["global"] |= {"scrape_interval": interval, "evaluation_interval": interval}
        jobs = [job for job in configuration["scrape_configs"] if job["job_name"] in addresses]
        configuration["scrape_configs"] = jobs
        for job in jobs:
            address = addresses[job["job_name"]]
            if "static_configs" in job:
                (target,) = job["static_configs"]
                target["labels"] = {"instance": target["targets"][0]}  # as it is there
                target["targets"] = [address]
            else:  # DNS finds it in a network of containers; relabelling sets its instance
                del job["dns_sd_configs"]
                job["static_configs"] = [{"targets": [address]}]
        _write(directory / "prometheus.yml", configuration)
        for path in (directory / "rules").iterdir():
            rules = yaml.safe_load(path.read_text())
            for group in rules["groups"]:
                group["interval"] = interval
            _write(path, rules)

    async def __aenter__(self) -> LocalPrometheus:
        """Start it and wait until it has scraped each process, so that a rate sees all that follows.

        It finds its targets some seconds after it answers.
        """
        directory = Path(self._directory.name)
        with (directory / "log").open("w") as log:
            self._process = await asyncio.create_subprocess_exec(
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self._address}",
                stderr=log,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not await self._has_scraped_all():
            if self._process.returncode is not None or time.monotonic() > deadline:
                why = (directory / "log").read_text()
                await self.__aexit__()
                raise RuntimeError(f"prometheus did not start:\n{why}")
            await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        self._directory.cleanup()

    async def query(self, expression: str) -> list[Series]:
        """Evaluate an expression now. Raises ValueError, in Prometheus' words, if it is invalid."""
        return await self._get("query", query=expression)

    async def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """Evaluate an expression at each step of a time. Raises ValueError likewise."""
        return await self._get("query_range", query=expression, start=str(start), end=str(end), step=str(step))

    async def rules(self) -> list[dict[str, Any]]:
        """Return all rules, with their state."""
        groups = (await asyncio.to_thread(self._read, "rules", {}))["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def has_evaluated_all_rules_since(self, when: float) -> bool:
        """Return whether each rule was evaluated after a time, in seconds since the epoch."""
        last = [datetime.fromisoformat(rule["lastEvaluation"]).timestamp() for rule in await self.rules()]
        return min(last) > when

    async def _get(self, what: str, **parameters: str) -> list[Series]:
        result: list[Series] = (await asyncio.to_thread(self._read, what, parameters))["result"]
        return result

    def _read(self, what: str, parameters: dict[str, str]) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from error

    async def _has_scraped_all(self) -> bool:
        try:
            return len(await self.query("up")) == self._num_targets
        except (OSError, ValueError):  # it does not listen yet, or is not ready
            return False


def _write(path: Path, content: Any) -> None:
    path.write_text(yaml.safe_dump(content))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
