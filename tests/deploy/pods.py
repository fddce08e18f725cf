"""Containers of the chart as processes of this machine: with other ports and paths, and else as they are rendered."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from specd.cli.health import health_of
from specd.identity.authority import Authority, standard_leaves
from tests.deploy.chart import Object
from tests.e2e.processes import PATIENCE_SECONDS, environment

SPECD = [sys.executable, "-m", "specd"]


def make_secrets(directory: Path, hosts: Sequence[str] = ()) -> None:
    """Make a directory for each role with tls.crt, tls.key and ca.crt, as Secrets of kubernetes.io/tls have them.

    The certificates are not for the loopback address, unlike those of `specd certs`: cert-manager knows Services alone.
    """
    authority = Authority.create(directory)
    for leaf in standard_leaves(hosts):
        authority.issue(replace(leaf, hosts=tuple(hosts) if leaf.hosts else ()), days=30, replace=False)
        secret = directory / leaf.name
        secret.mkdir()
        (secret / "ca.crt").write_bytes((directory / "ca.crt").read_bytes())
        for ending in ("crt", "key"):
            (directory / f"{leaf.name}.{ending}").rename(secret / f"tls.{ending}")


@dataclass
class Machine:
    """Has a port for each port of the cluster, and a directory for each mount."""

    directory: Path
    _ports: dict[str, int] = field(default_factory=dict)

    def port(self, wanted: str) -> int:
        """Return the local port that stands for a port of the cluster."""
        if wanted not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._ports[wanted] = free.getsockname()[1]
        return self._ports[wanted]

    def here(self, text: str, process: str) -> str:
        """Return an argument of a process, or of its probe, with the paths and ports of this machine."""
        text = re.sub("=/tls/", f"={self.directory}/{process}/", text)
        text = re.sub("=/tokens/", f"={self.directory}/", text)
        text = re.sub("dns:[a-z.-]+:", "dns:localhost:", text)
        text = text.replace("$(LWS_LEADER_ADDRESS)", "127.0.0.1")
        return re.sub(r"(?<=[a-z0-9]:)\d{4,5}\b", lambda match: str(self.port(match[0])), text)

    @contextlib.asynccontextmanager
    async def running(self, container: Object) -> AsyncIterator[None]:
        """Run a container for the length of a block; afterwards SIGTERM must end it well."""
        process = container["args"][1]
        arguments = [self.here(argument, process) for argument in container["args"]]
        # This machine has its own cache, with measured costs.
        variables = {each["name"]: each["value"] for each in container.get("env", ()) if each["value"][0] != "/"}
        started = await asyncio.create_subprocess_exec(
            *SPECD, *arguments, env=environment(**variables), start_new_session=True
        )
        try:
            yield
        finally:
            follows = any(argument.startswith("--follow=") for argument in arguments)  # and ends with rank 0
            assert started.returncode is None or follows, f"the {process} ended with {started.returncode}"
            with contextlib.suppress(ProcessLookupError):
                started.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    assert await started.wait() == 0, process
            except TimeoutError:
                started.kill()
                raise

    async def probe(self, container: Object, kind: str) -> bool:
        """Return whether a probe of a container succeeds, as the kubelet asks."""
        probe, process = container[f"{kind}Probe"], container["args"][1]
        if "grpc" in probe:
            address = f"127.0.0.1:{self.port(str(probe['grpc']['port']))}"
            try:
                return await health_of(address, probe["grpc"].get("service", ""), 1.0) == "SERVING"
            except grpc.aio.AioRpcError:
                return False
        if "httpGet" in probe:
            ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
            asked = probe["httpGet"]
            url = f"{asked['scheme'].lower()}://127.0.0.1:{self.port(ports[asked['port']])}{asked['path']}"
            return await asyncio.to_thread(_answers, url)
        command = [self.here(argument, process) for argument in probe["exec"]["command"]]
        devnull = asyncio.subprocess.DEVNULL
        done = await asyncio.create_subprocess_exec(
            *SPECD, *command[1:], env=environment(), stdout=devnull, stderr=devnull
        )
        return await done.wait() == 0

    async def wait_for(self, container: Object, kind: str) -> None:
        """Wait until a probe of a container succeeds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await self.probe(container, kind):  # noqa: ASYNC110 - the kubelet asks again and again
                await asyncio.sleep(0.1)


def _answers(url: str) -> bool:
    # The kubelet looks at no certificate.
    context = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(url, timeout=10, context=context) as response:
            return bool(200 <= response.status < 400)
    except (OSError, urllib.error.HTTPError):
        return False
