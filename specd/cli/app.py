"""The command line: `specd --help`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from specd import __version__
from specd.cli.generate import DEMO_PROMPT, show_comparison, show_completion
from specd.cli.health import health_of
from specd.cli.options import SettingsT, load_settings, settings_options
from specd.errors import InvalidRequestError, StartupError, error_info
from specd.logs import configure_logging
from specd.sampling import Acceptance, Sampling
from specd.sampling_messages import acceptance_message
from specd.settings import (
    EMBEDDED_DRAFT,
    EMBEDDED_TARGET,
    MAX_NUM_DRAFT_TOKENS,
    CoordinatorSettings,
    DraftWorkerSettings,
    LogSettings,
    TargetWorkerSettings,
    UpSettings,
)
from specd.supervisor import Stack
from specd.v1 import generation_pb2, sampling_pb2

app = typer.Typer(
    name="specd",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # the panels cut off variable names that are longer than their last column
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AddressOption = Annotated[
    str, typer.Option(envvar="SPECD_ADDRESS", metavar="ADDRESS", help="Where the coordinator listens.")
]


def run_command(arguments: Sequence[str] | None) -> None:
    """Run a command; what the user can mend is one line on stderr, and exit code 2."""
    try:
        app(args=arguments)
    except StartupError as error:
        _complain(str(error))
        sys.exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specd {__version__}")
        raise typer.Exit


@app.callback()
def configure(
    config: Annotated[
        Path | None, typer.Option(help="Settings file, TOML. [SPECD_CONFIG] (default: specd.toml if there is one)")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. [SPECD_LOG_LEVEL] (default: info)")
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(help="pretty, json, or auto: pretty on a terminal. [SPECD_LOG_FORMAT] (default: auto)"),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding as a gRPC service on MLX.

    Every option can also be set by the variable in brackets, or in the settings file, in the table of its command.
    """
    # In the environment, so that the processes that a command starts have them too.
    for variable, value in (("CONFIG", config), ("LOG_LEVEL", log_level), ("LOG_FORMAT", log_format)):
        if value is not None:
            os.environ[f"SPECD_{variable}"] = str(value)


@app.command("draft-worker")
@settings_options(DraftWorkerSettings)
def draft_worker(settings: DraftWorkerSettings) -> None:
    """Serve a draft model."""
    from draft_worker.process import run

    _serve("draft-worker", run, settings)


@app.command("target-worker")
@settings_options(TargetWorkerSettings)
def target_worker(settings: TargetWorkerSettings) -> None:
    """Serve a target model."""
    from target_worker.process import run

    _serve("target-worker", run, settings)


@app.command()
@settings_options(CoordinatorSettings)
def coordinator(settings: CoordinatorSettings) -> None:
    """Serve clients, with a target worker and a draft worker."""
    from coordinator.process import run

    _serve("coordinator", run, settings)


@app.command()
@settings_options(UpSettings)
def up(settings: UpSettings) -> None:
    """Start draft worker, target worker and coordinator, keep them running, and stop them on Ctrl-C."""
    _configure_logging("up")
    asyncio.run(_up(settings))


async def _up(settings: UpSettings) -> None:
    stack = Stack(
        target=settings.target,
        draft=settings.draft,
        listen=settings.listen,
        # Else the coordinator's own settings hold.
        num_draft_tokens=settings.num_draft_tokens if "num_draft_tokens" in settings.model_fields_set else None,
        metrics_listen=None if settings.metrics else "",
    )
    holding = asyncio.ensure_future(_hold(stack))

    def on_signal() -> None:
        if holding.cancelling():
            stack.kill()  # the second signal
        holding.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await holding


async def _hold(stack: Stack) -> None:
    async with stack:
        facts = stack.coordinator.facts
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(
            f"[bold green]specd is ready[/] at [bold]{stack.address}[/]: {facts['target']} with draft {facts['draft']}"
        )
        for child in stack.children:
            if child.facts["metrics_address"]:
                console.print(f"  metrics of the {child.name}: http://{child.facts['metrics_address']}/metrics")
        console.print(f"  try: specd generate --address {stack.address} 'def fibonacci(n):'")
        await asyncio.Event().wait()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from standard input.")],
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "-k",
            min=0,
            max=MAX_NUM_DRAFT_TOKENS,
            help="Draft tokens a round; 0: target alone. (default: the coordinator's, which may choose each round)",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, max=2**32 - 1, help="Most tokens to generate.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy; else 0.01 to 100.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Sample from the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens that make up this much.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Sample from tokens this likely relative to the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Makes sampling repeatable.")] = None,
    acceptance: Annotated[Acceptance, typer.Option(help="How draft tokens are accepted.")] = Acceptance.COUPLED,
    lenience: Annotated[float, typer.Option(help="With rejection: accept so much more often; not exact.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; can be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message of a conversation.")] = False,
    session: Annotated[str, typer.Option(metavar="ID", help="Continue this session.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the messages as JSON, one a line.")] = False,
    address: AddressOption = "127.0.0.1:50051",
) -> None:
    """Stream a completion from a running coordinator."""
    text = _read_prompt(prompt)
    message = generation_pb2.ChatMessage(role="user", content=text)
    fields = {
        "max_tokens": max_tokens,
        "num_draft_tokens": num_draft_tokens,
        "session_id": session,
        "stop": generation_pb2.StopConditions(strings=stop or ()),
        "sampling": sampling_pb2.SamplingParameters(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            acceptance=acceptance_message(acceptance),
            lenience=lenience,
        ),
    }
    with _grpc_errors(address):
        asyncio.run(
            show_completion(
                address, generation_pb2.Chat(messages=[message]) if chat else text, as_json=as_json, **fields
            )
        )


def _read_prompt(argument: str) -> str:
    data = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StartupError(f"the prompt is not UTF-8 text: {error}") from error


@app.command()
def health(
    address: Annotated[
        str, typer.Argument(envvar="SPECD_ADDRESS", help="Where the process listens: HOST:PORT or unix:PATH.")
    ] = "127.0.0.1:50051",
    service: Annotated[
        str, typer.Option(metavar="NAME", help="Of this service, such as specd.v1.DraftService.", show_default=False)
    ] = "",
    timeout_seconds: Annotated[float, typer.Option(min=0.01, help="How long to wait for the answer.")] = 3.0,
) -> None:
    """Say whether a process serves; exit with 1 if it does not."""
    try:
        status = asyncio.run(health_of(address, service, timeout_seconds))
    except grpc.aio.AioRpcError as error:
        _complain(f"{address} does not say whether it serves: {error.code().name}: {error.details()}")
        raise typer.Exit(1) from error
    typer.echo(f"{address} {status}")
    if status != "SERVING":
        raise typer.Exit(1)


@app.command()
def demo() -> None:
    """Start everything on the embedded pair, stream a completion, print its numbers, and stop."""
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    _configure_logging("demo")
    asyncio.run(_demo())


async def _demo() -> None:
    Console(stderr=True).print("starting draft worker, target worker and coordinator …", style="dim")
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT) as stack:
        await show_comparison(stack.address, DEMO_PROMPT)


@app.command()
def bench(
    target: Annotated[str, typer.Option(help="Target model.", show_default=False)] = EMBEDDED_TARGET,
    draft: Annotated[str, typer.Option(help="Draft model.", show_default=False)] = EMBEDDED_DRAFT,
    num_draft_tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--num-draft-tokens", "-k", min=1, max=MAX_NUM_DRAFT_TOKENS, help="Repeat for each k. (default: 3 4 5 7)"
        ),
    ] = None,
    adaptive: Annotated[
        bool | None,
        typer.Option("--adaptive/--no-adaptive", help="Besides, let specd choose k each round. (default: adaptive)"),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="Repeat for each; 0: greedy; else 0.01 to 100. (default: 0)"),
    ] = None,
    acceptance: Annotated[
        list[Acceptance] | None,
        typer.Option(help="Repeat for each way to accept draft tokens. (default: coupled)", show_default=False),
    ] = None,
    lenience: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="With rejection: repeat for each. (default: 0)")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", "-c", min=1, help="Measure the throughput of so many sessions; repeat for each."),
    ] = None,
    cached_prompts: Annotated[
        bool, typer.Option("--cached-prompts", help="With --concurrency: leave the prompts' own time out.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help='Directory of prompts, a file each, or file, a JSON string or {"prompt": …} a line. (default: ours)',
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Use this many of them, evenly spread.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Tokens to generate for each.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Runs over all prompts.")] = 1,
    blas_threads: Annotated[int, typer.Option(min=1, help="OpenBLAS threads, on a Linux CPU.")] = os.cpu_count() or 1,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, writable=True, help="Write the results and every sample to this file."),
    ] = None,
    plot_path: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            dir_okay=False,
            writable=True,
            help="Draw speed-up and acceptance rate over k into this PNG file. Needs matplotlib.",
        ),
    ] = None,
) -> None:
    """Measure specd against its target alone and against mlx-lm in process, in one run on the same prompts."""
    try:
        for value in temperature or ():
            Sampling(temperature=value).check(vocabulary_size=1, model_name=target)
    except InvalidRequestError as error:
        raise StartupError(str(error)) from error
    if concurrency and (temperature or acceptance or lenience):
        raise StartupError(
            "--concurrency measures greedy decoding: leave --temperature, --acceptance and --lenience out"
        )
    if concurrency and plot_path is not None:
        raise StartupError("--plot draws what one session gets for each k: leave --plot or --concurrency out")
    if cached_prompts and not concurrency:
        raise StartupError("--cached-prompts is for throughput only: add --concurrency")
    if any(lenience or ()) and Acceptance.REJECTION not in (acceptance or ()):
        raise StartupError("--lenience is for rejection only: add --acceptance rejection")
    if plot_path is not None and plot_path.suffix.lower() != ".png":
        raise StartupError(f"--plot writes PNG, and {plot_path} is named otherwise: let the name end in .png")
    for path in (json_path, plot_path):
        _check_can_be_written(path)

    from specd.worker.blas import load_blas

    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    _configure_logging("bench")
    blas = load_blas(blas_threads)  # whose variables the workers inherit

    from specd.bench.plot import require_matplotlib
    from specd.bench.prompts import load_prompts
    from specd.bench.run import Options, run_bench, run_throughput

    if plot_path is not None:
        require_matplotlib()
    chosen = load_prompts(prompts)
    names = list(chosen)[:: max(1, len(chosen) // num_prompts)][:num_prompts]
    options = Options(
        target=target,
        draft=draft,
        prompts={name: chosen[name] for name in names},
        num_draft_tokens=num_draft_tokens or [3, 4, 5, 7],
        max_tokens=max_tokens,
        repeats=repeats,
        blas=blas,
        temperatures=temperature or [0.0],
        acceptance=acceptance or [Acceptance.COUPLED],
        lenience=lenience or [0.0],
        adaptive=adaptive is not False,
        concurrency=concurrency or [],
        cached_prompts=cached_prompts,
    )
    same = run_throughput(options, json_path) if concurrency else run_bench(options, json_path, plot_path)
    if not same:
        raise typer.Exit(1)


def _check_can_be_written(path: Path | None) -> None:
    """Raise StartupError if a file that does not exist yet cannot be made: measuring for its sake would be in vain."""
    if path is None or path.exists():
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise StartupError(f"cannot write {path}: {path.parent}: {error.strerror}") from error


def _serve(process: str, run: Callable[[SettingsT], Coroutine[Any, Any, None]], settings: SettingsT) -> None:
    _configure_logging(process)
    asyncio.run(run(settings))


def _configure_logging(process: str) -> None:
    configure_logging(load_settings(LogSettings, {}), process=process)


@contextlib.contextmanager
def _grpc_errors(address: str) -> Iterator[None]:
    """Say in a line what a call came to, and exit with 1."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not error_info(error).reason:
            _complain(f"no coordinator answers at {address}: start one with 'specd up'")
        else:
            _complain(f"{error.code().name}: {error.details()}")
        raise typer.Exit(1) from error


def _complain(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]specd:[/]", end=" ")
    console.print(" ".join(message.split()), markup=False)  # libraries' messages can have several lines
