"""Settings of `specd up`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specd.adapter_settings import Adapters
from specd.addresses import is_local
from specd.coordinator_settings import CoordinatorSettings
from specd.setting_types import Address, Directories, DraftTokens, File, MetricsAddress, ModelOrNone, Seconds
from specd.settings import DEFAULT_ADDRESS, DRAFT_TOKENS_HELP, EMBEDDED_DRAFT, EMBEDDED_TARGET, Settings
from specd.startup_error import StartupError
from specd.user_cache import user_cache_directory
from specd.vocabulary import LOOKUP_ALONE, OWN_HEAD, TokenSource


def _of_the_coordinator(name: str, description: str) -> Any:
    # Its variable is the coordinator's: SPECD_TLS_CERT is the certificate of a client.
    return Field("", validation_alias=f"SPECD_COORDINATOR_{name}", description=f"{description} 'none' for none.")


class UpSettings(Settings):
    """Settings of `specd up`. The processes that it starts also read their own."""

    table = "up"
    model_config = SettingsConfigDict(env_prefix="SPECD_", validate_by_name=True)

    target: str = Field(EMBEDDED_TARGET, description="Target model: a directory or a Hugging Face repository.")
    draft: ModelOrNone = Field(
        OWN_HEAD,
        description="Draft model; 'lookup' for look-up alone, 'none' for the target alone. The default 'auto' is the "
        "included draft for the included target. For others it is the fastest of the target's heads and the models "
        "on this machine with its tokenizer, by a short trial at first use; 'specd pair TARGET' shows them.",
    )
    draft_dirs: Directories = Field(
        "", description="Directories with models, with commas between them, among which 'auto' looks for a draft, too."
    )
    canary_draft: ModelOrNone = Field(
        "none",
        validate_default=True,
        description="Draft model on trial, in a draft worker of its own: it serves some sessions until it is known "
        "whether it is faster than the draft, then all or none. 'none': no trial.",
    )
    canary_share: float = Field(
        0.1, gt=0, le=0.5, description=CoordinatorSettings.model_fields["canary_share"].description
    )
    draft_in_target: bool = Field(
        False, description="Compute the draft, a model or a head, in the target worker, without a draft worker."
    )
    target_adapters: Adapters = Field(
        "",
        description="LoRA adapters of mlx-lm for the target, NAME=DIR with commas between them. A request chooses one "
        "by naming it as its model.",
    )
    draft_adapters: Adapters = Field(
        "",
        description="LoRA adapters for the draft, in the same form. For a session with an adapter, the draft uses its "
        "own adapter of the same name, if it has one.",
    )
    models: File = Field(
        "",
        description="File of several models, in TOML, or a directory with a directory for each, instead of --target: a "
        "request names its model, which is loaded when it is needed; SIGHUP reads the file again. 'none': one model.",
    )
    targets: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that hold the target and share the sessions: one for each GPU. If there are fewer "
        "GPUs, they share the machine's memory and cores.",
    )
    target_ranks: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that hold each target together, each a part: for one that is larger than a GPU.",
    )
    lookup: bool = Field(True, description=CoordinatorSettings.model_fields["lookup"].description)
    listen: Address = Field(DEFAULT_ADDRESS, description="gRPC address for clients: HOST:PORT or unix:PATH.")
    insecure: bool = Field(False, description="Admit every caller that reaches the address, also from other machines.")
    tls_cert: File = _of_the_coordinator(
        "TLS_CERT", "Certificate, PEM, which turns on TLS, also at --http if other machines reach that address."
    )
    tls_key: File = _of_the_coordinator("TLS_KEY", "Key of the certificate, PEM, without a password.")
    tls_ca: File = _of_the_coordinator(
        "TLS_CA", "Authority of the certificate, PEM. Without --tokens, clients must show a certificate of it."
    )
    tokens: File = _of_the_coordinator("TOKENS", "File of clients' tokens, which 'specd token' writes.")
    session_file: str = Field(
        "auto",
        description="File that keeps sessions over a restart, with their prompts and answers; 'none': memory alone. "
        "The default 'auto' is a file in the user's cache, unless other machines reach the address or tokens exist.",
    )
    http: MetricsAddress = Field(
        "none", description="Also serve OpenAI's HTTP API at this address, such as 127.0.0.1:8080; 'none' turns it off."
    )
    num_draft_tokens: DraftTokens = Field("auto", description=DRAFT_TOKENS_HELP)
    metrics: bool = Field(
        True,
        description="Serve /metrics of the three processes on ports 9464 to 9466, or on free ports instead.",
    )
    hang_seconds: Seconds = Field(
        30.0, description="Time without a beat after which a process is killed and started again."
    )

    def coordinator_session_file(self, *, has_tokens: bool) -> str:
        """Return the session file as the setting of a coordinator, which may ask clients for tokens."""
        if self.session_file != "auto":
            return self.session_file
        directory = user_cache_directory()
        is_private = is_local(self.listen) and not has_tokens and not self.listen.endswith(":0")
        if not is_private or directory is None:
            return "none"
        address = f"unix:{Path(self.listen[5:]).resolve()}" if self.listen.startswith("unix:") else self.listen
        return str(directory / f"sessions-{hashlib.sha256(address.encode()).hexdigest()[:12]}.sqlite")

    @property
    def draft_model(self) -> str:
        """The draft model, or "" without one."""
        if self.draft == OWN_HEAD:
            return EMBEDDED_DRAFT if self.target == EMBEDDED_TARGET else ""
        return "" if self.draft == LOOKUP_ALONE else self.draft

    @property
    def draft_worker_model(self) -> str:
        """The model of the draft worker, or "" without one."""
        return "" if self.draft_in_target else self.draft_model

    @property
    def self_draft(self) -> str:
        """The draft in the target worker, or "" without one."""
        if self.target_ranks > 1:
            return ""
        if self.draft == OWN_HEAD and not self.draft_model:
            return OWN_HEAD
        return self.draft_model if self.draft_in_target else ""

    @property
    def chooses_draft(self) -> bool:
        """Whether the draft is the fastest of the models on this machine. Targets with ranks have none of their own."""
        return self.draft == OWN_HEAD and not self.draft_model and self.target_ranks == 1

    @property
    def draft_directories(self) -> list[Path]:
        """The directories with further models to choose from."""
        return [Path(each) for each in self.draft_dirs.split(",") if each]

    def with_draft(self, draft: str, *, in_target: bool = False) -> UpSettings:
        """Return these settings with a draft that was chosen: a directory, OWN_HEAD, or LOOKUP_ALONE.

        It is `in_target` if only the target worker can compute it.
        """
        if draft == LOOKUP_ALONE and "lookup" in self.model_fields_set and not self.lookup:
            draft = ""
        in_target = (self.draft_in_target or in_target) and draft not in {"", LOOKUP_ALONE}
        return self.model_copy(update={"draft": draft, "draft_in_target": in_target})

    def source_settings(self) -> dict[str, bool]:
        """Return the coordinator's settings of who proposes; its own hold for the others. Raises StartupError."""
        given = self.lookup if "lookup" in self.model_fields_set else None
        if self.draft == LOOKUP_ALONE and given is False:
            raise StartupError("wrong settings: --draft lookup and --no-lookup contradict each other: leave out one")
        if self.target_ranks > 1 and self.draft_in_target:
            pair = f"--target-ranks {self.target_ranks} and --draft-in-target"
            raise StartupError(f"wrong settings: {pair} contradict each other: leave out one")
        if self.draft_in_target and not self.self_draft:
            pair = f"--draft {self.draft or 'none'} and --draft-in-target"
            raise StartupError(f"wrong settings: {pair} contradict each other: leave out one")
        if self.target_ranks > 1 and self.target_adapters:
            pair = f"--target-ranks {self.target_ranks} and --target-adapters"
            raise StartupError(f"wrong settings: {pair} contradict each other: leave out one")
        if self.draft_adapters and not self.draft_worker_model:
            raise StartupError("wrong settings: --draft-adapters needs a draft worker: leave it out, or set --draft")
        if self.canary_draft and not (self.draft_worker_model or self.chooses_draft):
            raise StartupError("wrong settings: --canary-draft needs a draft worker: leave it out, or set --draft")
        wanted = given if self.draft else False
        return {} if wanted is None else {"lookup": wanted}

    def source_names(self, coordinator: CoordinatorSettings) -> list[str]:
        """Return the sources besides the draft model, for people."""
        return [TokenSource.LOOKUP.label] if coordinator.lookup else []
