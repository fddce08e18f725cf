"""The settings of every process: flags first, then `SPECD_*` variables, then a TOML file, then the defaults here."""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from specd.errors import StartupError

# The most draft tokens a round can have, on the wire and in a request.
MAX_NUM_DRAFT_TOKENS = 32


def _check_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if address.startswith("unix:") and len(address) > len("unix:"):
        return address
    if not (colon and host and re.fullmatch("[0-9]{1,5}", port) and int(port) < 2**16):
        raise ValueError(f"{address!r} is not an address: write HOST:PORT or unix:PATH")
    return address


def _check_optional_address(address: str) -> str:
    return "" if address in {"", "none"} else _check_address(address)


def _check_tcp_address(address: str) -> str:
    if address.startswith("unix:"):
        raise ValueError(f"{address!r} is not a TCP address: write HOST:PORT")
    return _check_optional_address(address)


def _check_endpoint(url: str) -> str:
    if url in {"", "none"}:
        return ""
    if not re.fullmatch("https?://[^/ ]+/?", url):
        raise ValueError(f"{url!r} is not an OTLP endpoint for gRPC: write http://HOST:PORT or https://HOST:PORT")
    return url


def _check_draft_tokens(value: str) -> str:
    if value != "auto" and not (re.fullmatch("[0-9]{1,4}", value) and int(value) <= MAX_NUM_DRAFT_TOKENS):
        raise ValueError(f"{value!r} is neither 'auto' nor a number of tokens in [0, {MAX_NUM_DRAFT_TOKENS}]")
    return value


Address = Annotated[str, AfterValidator(_check_address)]
OptionalAddress = Annotated[str, AfterValidator(_check_optional_address)]
MetricsAddress = Annotated[str, AfterValidator(_check_tcp_address)]
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
ModelOrNone = Annotated[str, AfterValidator(lambda name: "" if name == "none" else name)]
Seconds = Annotated[float, Field(gt=0)]
DraftTokens = Annotated[str, BeforeValidator(str), AfterValidator(_check_draft_tokens)]
_DRAFT_TOKENS = (
    f"Draft tokens a round, where a request does not say: 0 to {MAX_NUM_DRAFT_TOKENS}, or 'auto': chosen each round, "
    "by what they cost and how many are accepted."
)


def _part_of_memory(divisor: int) -> Any:
    """Return a part of the machine's memory, in the words in which --help shows it."""
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // divisor // 2**20}MiB"


def embedded_model(name: str) -> str:
    """Return the directory of a model that comes with specd."""
    packaged = Path(str(files("specd"))) / "models" / name
    return str(packaged if packaged.is_dir() else Path(__file__).parents[1] / "models" / name)


EMBEDDED_TARGET = embedded_model("pycode-47m-4bit")
EMBEDDED_DRAFT = embedded_model("pycode-3.6m-8bit")


class Settings(BaseSettings):
    """Settings of one command; `table` is its table in the TOML file."""

    table: ClassVar[str] = ""
    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_ignore_empty=True, env_prefix="SPECD_")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the TOML file behind flags and environment."""
        content = _read_config(os.environ.get("SPECD_CONFIG", ""))
        values = (
            content.get(cls.table, {}) if cls.table else {k: v for k, v in content.items() if k in cls.model_fields}
        )
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=values)


class LogSettings(Settings):
    """How all commands log."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe event to log.")
    log_format: Literal["auto", "pretty", "json"] = Field(
        "auto", description="'auto' is pretty on a terminal and JSON elsewhere."
    )


_BLAS_THREADS = int(os.environ.get("OPENBLAS_NUM_THREADS") or os.cpu_count() or 1)


class WorkerSettings(Settings):
    """What the two workers have in common."""

    model: str
    listen: Address
    metrics_listen: MetricsAddress
    blas_threads: int = Field(_BLAS_THREADS, ge=1, description="Threads for matrix products, on a Linux CPU.")
    prefill_chunk_seconds: Seconds = Field(
        0.05, description="How long a prompt is computed on before other sessions get their turn."
    )
    cache_bytes: ByteSize = Field(
        _part_of_memory(4),
        gt=0,
        description="Memory for the caches of running sessions: a size such as 4GiB, by default a quarter of the "
        "machine's. What a session may come to must fit, else it waits.",
    )
    prefix_cache_bytes: ByteSize = Field(
        _part_of_memory(16),
        description="Memory for the caches of ended sessions, which new ones with the same beginning take over: "
        "a size such as 512MiB, by default a sixteenth of the machine's, 0 for none.",
    )
    calibration_seconds: Seconds = Field(
        2.0, description="How long the first start of a model measures what its steps cost; later ones know it."
    )
    shutdown_grace_seconds: Seconds = Field(5.0, description="How long a stop waits for open streams.")


class DraftWorkerSettings(WorkerSettings):
    """Settings of `specd draft-worker`."""

    table = "draft-worker"
    model_config = SettingsConfigDict(env_prefix="SPECD_DRAFT_WORKER_")

    blas_threads: int = Field(
        max(_BLAS_THREADS // 2, 1),
        ge=1,
        description="Threads for matrix products, on a Linux CPU: by default half of the target worker's.",
    )
    model: str = Field(EMBEDDED_DRAFT, description="Draft model: a directory or a Hugging Face repository.")
    listen: Address = Field("127.0.0.1:50052", description="gRPC address: HOST:PORT or unix:PATH.")
    metrics_listen: MetricsAddress = Field(
        "127.0.0.1:9465", description="HOST:PORT of /metrics; 'none' for none, port 0 for any free."
    )


class TargetWorkerSettings(WorkerSettings):
    """Settings of `specd target-worker`."""

    table = "target-worker"
    model_config = SettingsConfigDict(env_prefix="SPECD_TARGET_WORKER_")

    model: str = Field(EMBEDDED_TARGET, description="Target model: a directory or a Hugging Face repository.")
    listen: Address = Field("127.0.0.1:50053", description="gRPC address: HOST:PORT or unix:PATH.")
    metrics_listen: MetricsAddress = Field(
        "127.0.0.1:9466", description="HOST:PORT of /metrics; 'none' for none, port 0 for any free."
    )


class CoordinatorSettings(Settings):
    """Settings of `specd coordinator`."""

    table = "coordinator"
    model_config = SettingsConfigDict(env_prefix="SPECD_COORDINATOR_")

    target: Address = Field("127.0.0.1:50053", description="Address of the target worker.")
    draft: OptionalAddress = Field("127.0.0.1:50052", description="Address of the draft worker; 'none' for none.")
    listen: Address = Field("127.0.0.1:50051", description="gRPC address for clients: HOST:PORT or unix:PATH.")
    metrics_listen: MetricsAddress = Field(
        "127.0.0.1:9464", description="HOST:PORT of /metrics; 'none' for none, port 0 for any free."
    )
    otlp_endpoint: Endpoint = Field(
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "none",
        validate_default=True,
        description="OpenTelemetry endpoint (gRPC) for spans of sessions and rounds, such as http://localhost:4317; "
        "'none' for none. By default OTEL_EXPORTER_OTLP_ENDPOINT. Needs specd[tracing].",
    )
    num_draft_tokens: DraftTokens = Field("auto", description=_DRAFT_TOKENS)
    draft_ahead: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether the draft goes on while the target verifies. 'auto': for a single session, where it pays.",
    )
    draft_timeout_seconds: Seconds = Field(
        2.0, description="How long a round waits for its proposal before it goes on with the target alone."
    )
    target_timeout_seconds: Seconds = Field(
        120.0, description="How long a round waits for its verdict before the target counts as lost."
    )
    target_recovery_seconds: Seconds = Field(
        30.0, description="How long a session waits for a lost target to come back before it fails."
    )
    draft_startup_seconds: Seconds = Field(
        60.0, description="How long the start waits for the draft worker before it serves without."
    )
    max_sessions: int = Field(32, ge=1, description="Most sessions that run at the same time; others wait.")
    max_queued: int = Field(
        128, ge=0, description="Most requests beyond those that wait; others are turned away with RESOURCE_EXHAUSTED."
    )
    session_idle_seconds: float = Field(
        600.0, ge=0, description="How long a session is kept after its last use, to be continued; 0 keeps none."
    )
    session_budget_tokens: int = Field(
        1_000_000, ge=0, description="Most tokens of all kept sessions together; the least recently used ones go."
    )
    shutdown_grace_seconds: Seconds = Field(10.0, description="How long a stop waits for running sessions.")

    @property
    def given_num_draft_tokens(self) -> int | None:
        """Draft tokens a round where a request does not say, unless they are chosen each round."""
        return None if self.num_draft_tokens == "auto" else int(self.num_draft_tokens)


class UpSettings(Settings):
    """Settings of `specd up`; the processes that it starts read their own as well."""

    table = "up"
    model_config = SettingsConfigDict(env_prefix="SPECD_")

    target: str = Field(EMBEDDED_TARGET, description="Target model: a directory or a Hugging Face repository.")
    draft: ModelOrNone = Field(EMBEDDED_DRAFT, description="Draft model, likewise; 'none' for none.")
    listen: Address = Field("127.0.0.1:50051", description="gRPC address for clients: HOST:PORT or unix:PATH.")
    num_draft_tokens: DraftTokens = Field("auto", description=_DRAFT_TOKENS)
    metrics: bool = Field(True, description="Serve /metrics of the three processes on ports 9464 to 9466.")


@cache
def _read_config(path: str) -> dict[str, Any]:
    file = Path(path or "specd.toml")
    if not path and not file.is_file():
        return {}
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the settings file {file}: {error}") from error
    known = {cls.table for cls in (DraftWorkerSettings, TargetWorkerSettings, CoordinatorSettings, UpSettings)}
    if unknown := sorted(set(content) - known - set(LogSettings.model_fields)):
        raise StartupError(f"the settings file {file} has unknown entries: {', '.join(unknown)}")
    for name in known & set(content):
        if not isinstance(content[name], dict):
            raise StartupError(
                f"in the settings file {file}, {name} is {content[name]!r}: it must be a table, [{name}]"
            )
    return content
