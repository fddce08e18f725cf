"""A release of the chart in a cluster, by helm and kubectl."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from specd.startup_error import StartupError

CHART = Path(__file__).parent / "specd"
_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")
_FORWARD_SECONDS = 30.0


class Cluster:
    """A release of the chart in a namespace."""

    def __init__(self, release: str, namespace: str, context: str = "") -> None:
        """`context` is one of the kubeconfig, by default its current one."""
        self.release = release
        self.namespace = namespace
        self._of_kubectl = ["--context", context] if context else []
        self._of_helm = ["--kube-context", context] if context else []

    async def check(self) -> None:
        """Raise StartupError if there is no helm, no kubectl or no cluster."""
        for program in ("helm", "kubectl"):
            if shutil.which(program) is None:
                raise StartupError(
                    f"there is no {program} on the path: install it, or check a specd that runs already with --address"
                )
        try:
            await self.kubectl("get", "--raw", "/readyz", "--request-timeout=10s")
        except RuntimeError as error:
            raise StartupError(
                f"kubectl reaches no cluster: {error}; set KUBECONFIG or --context, or check a specd that runs already "
                "with --address"
            ) from error

    async def install(self, values: Sequence[Path], timeout: str) -> None:
        """Install the chart, or update the release, and wait until its pods are ready. Raises RuntimeError."""
        options = [option for path in values for option in ("--values", str(path))]
        command = ["upgrade", "--install", self.release, str(CHART), "--create-namespace", "--wait"]
        await self.helm(*command, "--timeout", timeout, *options)

    async def uninstall(self) -> None:
        """Remove the release; the namespace stays. Raises RuntimeError."""
        await self.helm("uninstall", self.release, "--wait")

    async def kill_a_target(self) -> None:
        """Kill a pod of a target, without time to drain, and return once the Deployment is whole again."""
        pods = await self.kubectl("get", "pods", "--selector", self._selector("target-worker"), "--output", "json")
        names = [pod["metadata"]["name"] for pod in json.loads(pods)["items"] if pod["status"]["phase"] == "Running"]
        if not names:
            raise RuntimeError("there is no pod of a target that runs")
        await self.kubectl("delete", "pod", names[0], "--grace-period=1", "--wait=true")
        await self._wait_for_targets()

    async def update_targets(self) -> None:
        """Replace all pods of targets, as an update does, and return when that is done."""
        await self.kubectl("rollout", "restart", await self._targets())
        await self._wait_for_targets()

    async def _wait_for_targets(self) -> None:
        await self.kubectl("rollout", "status", await self._targets(), "--timeout=30m")

    async def _targets(self) -> str:
        return await self._one("deployment", "target-worker")

    async def _one(self, kind: str, component: str, *more: str) -> str:
        found = await self.kubectl("get", kind, "--selector", self._selector(component), "--output", "name", *more)
        if not found.split():
            raise RuntimeError(f"the release has no {kind} of the {component}")
        return found.split()[0]

    def _selector(self, component: str) -> str:
        return f"app.kubernetes.io/instance={self.release},app.kubernetes.io/component={component}"

    @contextlib.asynccontextmanager
    async def coordinator(self) -> AsyncIterator[str]:
        """Forward a port of this machine to a coordinator, and yield the address. Raises RuntimeError."""
        pod = await self._one("pod", "coordinator", "--field-selector=status.phase=Running")
        command = ["kubectl", *self._of_kubectl, "--namespace", self.namespace, "port-forward", pod, ":50051"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_FORWARD_SECONDS):
                line = (await process.stdout.readline()).decode()
            match = _FORWARDED.search(line)
            if match is None:
                raise RuntimeError(f"kubectl port-forward said: {line.strip()}")
            yield f"127.0.0.1:{match[1]}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()

    async def state(self) -> str:
        """Return the pods and the latest events, for the report of a failure."""
        parts = []
        for arguments in (("get", "pods", "--output", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
            with contextlib.suppress(RuntimeError):
                parts.append("\n".join((await self.kubectl(*arguments)).splitlines()[-30:]))
        return "\n\n".join(parts)

    async def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the namespace, and return what it prints. Raises RuntimeError with its message."""
        return await _run("kubectl", *self._of_kubectl, "--namespace", self.namespace, *arguments)

    async def helm(self, *arguments: str) -> str:
        """Run helm in the namespace, and return what it prints. Raises RuntimeError with its message."""
        return await _run("helm", *self._of_helm, "--namespace", self.namespace, *arguments)


async def _run(*command: str) -> str:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    if process.returncode:
        said = " ".join(err.decode(errors="replace").split())[-400:]
        raise RuntimeError(f"{' '.join(command[:1])} ended with {process.returncode}: {said}")
    return out.decode()
