"""Installs the chart in a cluster, or takes a specd that runs elsewhere, checks it under disturbance, and reports.

In a cluster, with your values for images and models:

    python -m deploy.helm.check_cluster --values my-values.yaml --json report.json

Elsewhere, such as on two Macs. Each --disturb is a command that ends or restarts one target, and returns:

    python -m deploy.helm.check_cluster --address mac-1.local:50051 \
        --disturb 'ssh mac-2.local launchctl kickstart -k gui/501/specd.target-worker'

Exit codes: 0: all checks passed. 1: a check failed. 2: it could not begin.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.helm.cluster import Cluster
from deploy.helm.service_checks import Outcome, ServiceChecks
from specd.cli.connection import TlsCa, TlsCert, TlsKey, TlsName, Token
from specd.launch import complain, new_app, run_app
from specd.rpc.credentials import ClientCredentials

Disturbances = Mapping[str, Callable[[], Awaitable[None]]]

app = new_app("check_cluster")


@app.command(help=__doc__)
def check(
    values: Annotated[list[Path] | None, typer.Option(help="Values file of the chart; can be repeated.")] = None,
    release: Annotated[str, typer.Option(help="Name of the release.")] = "specd-check",
    namespace: Annotated[str, typer.Option(help="Namespace, which is made if it is not there.")] = "specd-check",
    context: Annotated[str, typer.Option(help="Context of the kubeconfig.")] = "",
    timeout: Annotated[str, typer.Option(help="Time that the pods have to become ready.")] = "30m",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the release installed.")] = False,
    address: Annotated[str, typer.Option(help="Address of a coordinator that runs; no cluster is used.")] = "",
    disturb: Annotated[list[str] | None, typer.Option(help="Command that ends a target; can be repeated.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text.")] = 96,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the report.")] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token: Token = "",
) -> None:
    """Check, print the report, and exit with 1 if a check failed."""
    credentials = ClientCredentials(tls_ca, tls_cert, tls_key, token, server_name=tls_name)
    if address:
        commands = {f"texts during: {command}": partial(run_command, command) for command in disturb or []}
        outcomes = asyncio.run(_check_service(address, credentials, commands, max_tokens))
    else:
        cluster = Cluster(release, namespace, context)
        outcomes = asyncio.run(_check_cluster(cluster, values or [], timeout, keep, credentials, max_tokens))
    _print(outcomes)
    if json_file is not None:
        json_file.write_text(json.dumps([outcome.as_json() for outcome in outcomes], indent=2) + "\n")
    if not all(outcome.passed for outcome in outcomes):
        raise typer.Exit(1)


async def _check_cluster(
    cluster: Cluster, values: list[Path], timeout: str, keep: bool, credentials: ClientCredentials, max_tokens: int
) -> list[Outcome]:
    await cluster.check()
    name = "the chart is installed, and all pods are ready"
    try:
        await cluster.install(values, timeout)
        disturbances: Disturbances = {
            "texts while a target is killed": cluster.kill_a_target,
            "texts while all targets are replaced": cluster.update_targets,
        }
        async with cluster.coordinator() as address:
            outcomes = await _check_service(address, credentials, disturbances, max_tokens)
    except RuntimeError as error:
        return [Outcome(name, False, problem=f"{error}\n{await cluster.state()}")]
    finally:
        if not keep:
            await _uninstall(cluster)
    return [Outcome(name, True), *outcomes]


async def _uninstall(cluster: Cluster) -> None:
    try:
        await cluster.uninstall()
    except RuntimeError as error:
        complain(f"the release {cluster.release} is still in the namespace {cluster.namespace}: {error}")


async def _check_service(
    address: str, credentials: ClientCredentials, disturbances: Disturbances, max_tokens: int
) -> list[Outcome]:
    async with ServiceChecks(address, credentials, max_tokens=max_tokens) as checks:
        outcomes = [await checks.compare()]
        if outcomes[0].figures:  # there are texts to compare others with
            outcomes += [await checks.under_load(name, disturbance) for name, disturbance in disturbances.items()]
    return outcomes


async def run_command(command: str) -> None:
    """Run a command of the shell. Raises RuntimeError if it fails."""
    process = await asyncio.create_subprocess_shell(command, stdin=subprocess.DEVNULL)
    if await process.wait():
        raise RuntimeError(f"{command!r} ended with {process.returncode}")


def _print(outcomes: list[Outcome]) -> None:
    console = Console()
    for outcome in outcomes:
        console.print(f"{'[green]passed[/]' if outcome.passed else '[red]FAILED[/]'}  {outcome.name}")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 8))
        for name, value in outcome.figures.items():
            table.add_row(name, str(value))
        if outcome.figures:
            console.print(table)
        if outcome.problem:
            console.print(outcome.problem, style="red", markup=False, highlight=False)


if __name__ == "__main__":
    run_app(app)
