"""A Docker Compose project of its own, from a file in `deploy/`."""

from __future__ import annotations

import functools
import json
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.processes import environment

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 1200  # with all that images are built of still to be fetched
_PULL_SECONDS = 300
_PATIENCE_SECONDS = 120


def _answers(*command: str, timeout_seconds: float = 30) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# The plugin, or, where that is missing, the older program.
_COMPOSE = ("docker", "compose") if _answers("docker", "compose", "version") else ("docker-compose",)


@functools.cache
def why_not() -> str:
    """Return why no project can be started on this machine; "" if one can."""
    if not _answers("docker", "version", "--format", "{{.Server.Version}}"):
        return "no Docker engine answers"
    if not _answers(*_COMPOSE, "version"):
        return "there is no Docker Compose"
    missing = [image for image in _base_images() if not _is_here(image)]
    return f"{' and '.join(missing)} cannot be pulled, nor is a stand-in here" if missing else ""


def _base_images() -> list[str]:
    """Return the images of others: what ours are built from, and the service that tests start beside them."""
    dockerfile = re.findall(r"^ARG \w+_IMAGE=(\S+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    prometheus = re.findall(r"^ *image: (prom/\S+)$", (ROOT / "deploy" / "services.yaml").read_text(), re.MULTILINE)
    assert dockerfile
    assert prometheus
    return [*dockerfile, *prometheus]


def _is_here(image: str) -> bool:
    """Return whether the engine has an image, after a pull if need be."""
    return _answers("docker", "image", "inspect", image) or _answers(
        "docker", "pull", image, timeout_seconds=_PULL_SECONDS
    )


def docker(*arguments: str) -> str:
    """Run `docker` and return what it prints."""
    return _run("docker", *arguments, timeout_seconds=_PATIENCE_SECONDS)


def _run(*command: str, timeout_seconds: float, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


class Project:
    """A project under a name and on ports of its own."""

    def __init__(self, file: str, **variables: str) -> None:
        """Make a project of a compose file, named from the root of the repository; `up` starts it.

        `variables` are those of deploy/.env that are to be others.
        """
        self._variables = variables
        self.file = file
        self.name = f"specd-test-{secrets.token_hex(4)}"
        with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
            self.port, self.http_port = free.getsockname()[1], other.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def compose(self, *arguments: str, timeout_seconds: float = _PATIENCE_SECONDS) -> str:
        """Run Docker Compose with the project's file."""
        command = (*_COMPOSE, "-p", self.name, "-f", self.file, *arguments)
        ports = {"SPECD_PORT": str(self.port), "SPECD_HTTP_PORT": str(self.http_port)}
        return _run(*command, timeout_seconds=timeout_seconds, **ports, **self._variables)

    def up(self, *services: str) -> None:
        """Build and start services, and those that they depend on, and wait until all are healthy."""
        self.compose("up", "-d", "--build", *services, timeout_seconds=BUILD_SECONDS)
        try:
            wait_until(lambda: all(_state(id_)["Health"]["Status"] == "healthy" for id_ in self.containers()))
        except TimeoutError as error:
            raise AssertionError(self.compose("ps") + self.compose("logs", "--tail", "20")) from error

    def down(self) -> None:
        """Stop and remove everything, volumes too."""
        self.compose("down", "-v", "--remove-orphans")

    def containers(self) -> list[str]:
        """Return the ids of the project's containers."""
        return self._labelled("container", "ls", "-a")

    def container(self, service: str) -> str:
        """Return the id of a service's only container."""
        (found,) = self._labelled("container", "ls", "-a", "--filter", f"label=com.docker.compose.service={service}")
        return found

    def left(self) -> list[str]:
        """Return the containers, networks and volumes of the project that there are."""
        return [*self.containers(), *self._labelled("network", "ls"), *self._labelled("volume", "ls")]

    def _labelled(self, *command: str) -> list[str]:
        return docker(*command, "-q", "--filter", f"label=com.docker.compose.project={self.name}").split()

    def state(self, service: str) -> dict[str, Any]:
        """Return the state of a service's container, as `docker inspect` names it."""
        return _state(self.container(service))

    def execute(self, service: str, *command: str) -> str:
        """Run a command in a service's container and return what it prints."""
        return docker("exec", self.container(service), *command)

    def python(self, service: str, code: str) -> str:
        """Run Python code in a service's container and return what it prints."""
        return self.execute(service, "python3", "-c", code).strip()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return what the project's Prometheus says to an expression now."""
        command = ("promtool", "query", "instant", "-o", "json", "http://127.0.0.1:9090", expression)
        found: list[dict[str, Any]] = json.loads(self.execute("prometheus", *command))
        return found


def _state(container: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", container))
    return state


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that nothing announces. Raises TimeoutError."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("what the test waits for has not come")
        time.sleep(0.5)
