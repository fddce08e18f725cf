"""Settings of all processes: flags override `SPECD_*` variables, a TOML file, and the defaults here."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import ByteSize, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from specd.adapter_settings import AdapterSettings
from specd.addresses import is_local
from specd.machine import default_blas_threads, given_blas_threads, part_of_memory
from specd.rank_settings import RankSettings
from specd.setting_types import (
    MAX_NUM_DRAFT_TOKENS,
    Address,
    File,
    KvBits,
    KvGroupSize,
    MetricsAddress,
    ModelOrNone,
    Seconds,
)
from specd.settings_file import read_settings_file, suggestion
from specd.startup_error import StartupError
from specd.vocabulary import OWN_HEAD
from specd.wrong_value import requirement, wrong_value

# Where clients find the coordinator.
DEFAULT_ADDRESS = "127.0.0.1:50051"
# The tables of the settings file, one for each command.
TABLES = ("up", "draft-worker", "target-worker", "coordinator", "gateway")


_OPEN = (
    "{what} is {address}, which every machine in the network could use: set --tls-cert, --tls-key and {credentials} "
    "(docs/serving.md shows how), or --insecure if something else keeps strangers out"
)
DRAFT_TOKENS_HELP = (
    f"Draft tokens per round, unless a request sets k: 0 to {MAX_NUM_DRAFT_TOKENS}, or 'auto' for the number that "
    "measured cost and acceptance favour."
)


def embedded_model(name: str) -> str:
    """Return the directory of a model that comes with specd."""
    packaged = Path(str(files("specd"))) / "models" / name
    return str(packaged if packaged.is_dir() else Path(__file__).parents[1] / "models" / name)


EMBEDDED_TARGET = embedded_model("pycode-47m-4bit")
EMBEDDED_DRAFT = embedded_model("pycode-3.6m-8bit")
EMBEDDED_HEAD = embedded_model("pycode-47m-eagle3-8bit")
EMBEDDED_T5_TARGET = embedded_model("t5-code-28m-4bit")
EMBEDDED_T5_DRAFT = embedded_model("t5-code-3m-8bit")


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
        """Return the sources by priority: flags, environment, TOML file."""
        if isinstance(env_settings, EnvSettingsSource):  # a field with an alias must not also read its default variable
            own = {cls.variable_of(name).lower() for name in cls.model_fields}
            env_settings.env_vars = {name: value for name, value in env_settings.env_vars.items() if name in own}
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=cls.values_in_file())

    @classmethod
    def values_in_file(cls) -> dict[str, Any]:
        """Return the values in the settings file. Raises StartupError if a name is not a setting."""
        content = read_settings_file(os.environ.get("SPECD_CONFIG", ""), TABLES, frozenset(LogSettings.model_fields))
        if not cls.table:
            return {name: value for name, value in content.items() if name in cls.model_fields}
        values: dict[str, Any] = content.get(cls.table, {})
        if unknown := [name for name in values if name not in cls.model_fields]:
            raise StartupError(
                "wrong settings: "
                + "; ".join(f"[{cls.table}] has no {name!r}{suggestion(name, cls.model_fields)}" for name in unknown)
            )
        return values

    @classmethod
    def variable_of(cls, name: str) -> str:
        """Return the environment variable of a setting."""
        own = cls.model_fields[name].validation_alias
        return own if isinstance(own, str) else f"{cls.model_config.get('env_prefix', '')}{name}".upper()

    @classmethod
    def is_given(cls, name: str) -> bool:
        """Return whether the environment or the settings file sets a setting."""
        return bool(os.environ.get(cls.variable_of(name))) or name in cls.values_in_file()


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(cls: type[SettingsT], flags: dict[str, Any]) -> SettingsT:
    """Return the settings of a command. Raises StartupError, which names each invalid setting with its value."""
    try:
        return cls(**flags)
    except ValidationError as error:
        problems = "; ".join(_problem(cls, flags, each) for each in error.errors())
        raise StartupError(f"wrong settings: {problems}") from error
    except SettingsError as error:
        raise StartupError(f"wrong settings: {error}") from error


def _problem(cls: type[Settings], flags: dict[str, Any], problem: ErrorDetails) -> str:
    if not problem["loc"]:
        return requirement(problem)  # several settings clash
    name = str(problem["loc"][0])
    if name in flags:
        return wrong_value(f"--{name.replace('_', '-')}", problem)
    if cls.table and name in cls.model_fields:
        variable = cls.variable_of(name)
        return wrong_value(variable if os.environ.get(variable) else f"[{cls.table}] {name}", problem)
    return wrong_value(name, problem)


class LogSettings(Settings):
    """Logging of all commands."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe event to log.")
    log_format: Literal["auto", "pretty", "json"] = Field(
        "auto", description="Format of the log: 'auto' is pretty on a terminal and JSON elsewhere."
    )


_BLAS_THREADS = default_blas_threads()


class CertificateSettings(Settings):
    """Settings of a process that can show its peers a certificate, and ask them for one."""

    tls_cert: File = Field("", description="Certificate of this process, PEM, which turns on TLS; 'none': plaintext.")
    tls_key: File = Field("", description="Key of the certificate, PEM, without a password.")
    tls_ca: File = Field(
        "", description="Authorities, PEM. Peers must show a certificate of one of them, with the role for their calls."
    )

    @model_validator(mode="after")
    def _check_files_go_together(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(f"{given} is set, but {missing} is not: set both a certificate and its key")
        if self.tls_ca and not self.tls_cert:
            raise ValueError("tls_ca is set, but tls_cert is not: also set this process's own certificate")
        return self


class ListenerSettings(CertificateSettings):
    """Settings of a process that listens for gRPC, with its rules of access."""

    listen: Address
    metrics_listen: MetricsAddress
    insecure: bool = Field(False, description="Admit every caller that reaches the ports, also from other machines.")

    @property
    def asks_for_tokens(self) -> bool:
        """Whether clients at `listen` show a token."""
        return False

    @model_validator(mode="after")
    def _check_who_gets_in(self) -> Self:
        if self.insecure:
            return self
        if not (is_local(self.listen) or (self.tls_cert and (self.tls_ca or self.asks_for_tokens))):
            tokens = " or --tokens" if "tokens" in type(self).model_fields else ""
            raise ValueError(_OPEN.format(what="listen", address=self.listen, credentials=f"--tls-ca{tokens}"))
        for name in ("metrics_listen", "ranks_listen"):
            if (address := getattr(self, name, "")) and not (is_local(address) or self.tls_ca):
                raise ValueError(_OPEN.format(what=name, address=address, credentials="--tls-ca"))
        return self


class WorkerSettings(ListenerSettings, AdapterSettings):
    """Settings of both workers."""

    model: str
    blas_threads: int = Field(_BLAS_THREADS, ge=1, description="Threads for matrix products, on a Linux CPU.")
    prefill_chunk_seconds: Seconds = Field(
        0.05, description="Time that a prefill computes before other sessions have their turn."
    )
    cache_bytes: ByteSize = Field(
        part_of_memory(4),
        gt=0,
        description="Memory for the caches of running sessions, such as 4GiB; by default a quarter of the machine's "
        "memory. A session waits until its maximum length fits.",
    )
    prefix_cache_bytes: ByteSize = Field(
        part_of_memory(16),
        description="Memory for the prefix cache, which new sessions with the same beginning reuse, such as 512MiB; "
        "by default a sixteenth of the machine's memory, 0 for no prefix cache.",
    )
    memory_reserve_bytes: ByteSize = Field(
        part_of_memory(32),
        description="Memory to leave to the system, by default a thirty-second of the machine's memory. Where less is "
        "available, the worker frees its prefix cache, then begins no sessions, and below half of it ends the "
        "largest session, which the coordinator sends again. 0 turns this off.",
    )
    kv_bits: KvBits = Field(
        16, description="Bits per number in the caches of full attention; 16 keeps the numbers unquantised."
    )
    kv_group_size: KvGroupSize = Field(
        64, description="Numbers that share a scale in quantised caches; it must divide the size of a head."
    )
    calibration_seconds: Seconds = Field(
        4.0, description="Time to measure step costs at the first start of a model; the results are kept on disk."
    )
    hang_seconds: Seconds = Field(
        120.0, description="Time after which a hanging step ends the worker, so that its supervisor restarts it."
    )
    shutdown_grace_seconds: Seconds = Field(5.0, description="Time that a stop waits for open streams.")

    @model_validator(mode="after")
    def _check_default_of_blas_threads(self) -> Self:
        if "blas_threads" not in self.model_fields_set:
            given_blas_threads()
        return self


class DraftWorkerSettings(WorkerSettings):
    """Settings of `specd draft-worker`."""

    table = "draft-worker"
    model_config = SettingsConfigDict(env_prefix="SPECD_DRAFT_WORKER_")

    blas_threads: int = Field(
        max(_BLAS_THREADS // 2, 1),
        ge=1,
        description="Threads for matrix products, on a Linux CPU; by default half as many as the target worker's.",
    )
    model: str = Field(EMBEDDED_DRAFT, description="Draft model: a directory or a Hugging Face repository.")
    listen: Address = Field("127.0.0.1:50052", description="gRPC address: HOST:PORT or unix:PATH.")
    metrics_listen: MetricsAddress = Field(
        "127.0.0.1:9465", description="HOST:PORT of /metrics; 'none' turns it off, port 0 is any free port."
    )


class TargetWorkerSettings(WorkerSettings, RankSettings):
    """Settings of `specd target-worker`."""

    table = "target-worker"
    model_config = SettingsConfigDict(env_prefix="SPECD_TARGET_WORKER_")

    model: str = Field(EMBEDDED_TARGET, description="Target model: a directory or a Hugging Face repository.")
    self_draft: ModelOrNone = Field(OWN_HEAD, description="Its draft: a model, a head, 'auto' (its own head), 'none'.")
    listen: Address = Field("127.0.0.1:50053", description="gRPC address: HOST:PORT or unix:PATH.")
    metrics_listen: MetricsAddress = Field(
        "127.0.0.1:9466", description="HOST:PORT of /metrics; 'none' turns it off, port 0 is any free port."
    )
