"""Settings of the coordinator."""

from __future__ import annotations

import os
from typing import Any, Self, cast

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import SettingsConfigDict

from specd.addresses import split_addresses
from specd.setting_types import (
    Address,
    Addresses,
    DraftTokens,
    Endpoint,
    File,
    MetricsAddress,
    OptionalAddresses,
    Seconds,
    SessionServerUrl,
)
from specd.settings import DEFAULT_ADDRESS, DRAFT_TOKENS_HELP, ListenerSettings


class CoordinatorSettings(ListenerSettings):
    """Settings of `specd coordinator`."""

    table = "coordinator"
    model_config = SettingsConfigDict(env_prefix="SPECD_COORDINATOR_")

    target: Addresses = Field(
        "127.0.0.1:50053",
        description="Addresses of the target workers, which share the sessions, with commas between them; "
        "dns:HOST:PORT is all addresses of a name.",
    )
    draft: OptionalAddresses = Field(
        "127.0.0.1:50052", description="Addresses of the draft workers, in the same form; 'none': no worker."
    )
    canary_draft: OptionalAddresses = Field(
        "",
        description="Addresses of draft workers on trial, in the same form, which serve some sessions until it is "
        "known whether they are faster than the others: then all sessions, or none. 'none': no trial.",
    )
    canary_share: float = Field(
        0.1, gt=0, le=0.5, description="Part of the sessions that begin with the draft on trial, up to 0.5."
    )
    models: File = Field(
        "",
        description="File of several models, in JSON, each with the addresses of its workers, instead of --target and "
        "--draft; SIGHUP reads it again. 'specd up --models' writes one. 'none': one model.",
    )
    listen: Address = Field(DEFAULT_ADDRESS, description="gRPC address for clients: HOST:PORT or unix:PATH.")
    metrics_listen: MetricsAddress = Field(
        "127.0.0.1:9464", description="HOST:PORT of /metrics; 'none' turns it off, port 0 is any free port."
    )
    tokens: File = Field(
        "", description="File of clients' tokens, from 'specd token'. Every call then needs a token; 'none': no file."
    )
    otlp_endpoint: Endpoint = Field(
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "none",
        validate_default=True,
        description="OpenTelemetry endpoint (gRPC) for spans of sessions and rounds, such as http://localhost:4317; "
        "'none' turns spans off. By default OTEL_EXPORTER_OTLP_ENDPOINT. Needs specd[tracing].",
    )
    num_draft_tokens: DraftTokens = Field("auto", description=DRAFT_TOKENS_HELP)
    lookup: bool = Field(
        True, description="Also propose the tokens that followed an earlier occurrence of the latest tokens (look-up)."
    )
    stream_interval_seconds: float = Field(
        0.0,
        ge=0,
        description="Send text at this interval instead of after each round, because the sizes of rounds tell an "
        "eavesdropper something about the text; 0 sends each round at once.",
    )
    draft_timeout_seconds: Seconds = Field(
        2.0, description="Time that a round waits for its proposal before it decodes with the target alone."
    )
    target_timeout_seconds: Seconds = Field(
        120.0, description="Time that a round waits for its verdict before the target counts as lost."
    )
    target_recovery_seconds: Seconds = Field(
        30.0, description="Time that a session waits for a lost target before it fails."
    )
    draft_startup_seconds: Seconds = Field(
        60.0, description="Time that the start waits for the draft worker before it serves without one."
    )
    max_sessions: int = Field(
        32,
        ge=1,
        description="Maximum of concurrent sessions at each target; others wait. One more can run for a client "
        "without a session while another client has several.",
    )
    max_queued: int = Field(
        128, ge=0, description="Maximum of waiting requests; others are refused with RESOURCE_EXHAUSTED."
    )
    max_request_bytes: ByteSize = Field(
        cast(Any, "4MiB"),
        gt=0,
        le=64 * 2**20,
        description="Largest request that is accepted, such as 4MiB; larger ones are refused.",
    )
    chat_template_seconds: Seconds = Field(
        5.0, description="Time that a chat template may take for a conversation before its process is killed."
    )
    client_stall_seconds: Seconds = Field(
        30.0, description="Time that a client may leave a message unread before its session ends with CLIENT_STALLED."
    )
    connection_age_seconds: float = Field(
        3600.0, ge=0, description="Age at which a client's connection stops accepting new calls; 0 is no limit."
    )
    connection_grace_seconds: float = Field(
        3600.0,
        ge=0,
        description="Time that the calls of such a connection have left; they can be resumed after it. 0 is no limit.",
    )
    session_idle_seconds: float = Field(
        600.0, ge=0, description="Time that a session is kept after its last use; 0 keeps no sessions."
    )
    session_budget_tokens: int = Field(
        1_000_000,
        ge=0,
        description="Maximum of tokens in all kept sessions; the least recently used are dropped first.",
    )
    session_file: File = Field(
        "",
        description="File that keeps sessions over a restart, with their prompts and answers; 'none': memory alone.",
    )
    session_file_required: bool = Field(
        True, description="End at the start if the session file cannot be used; otherwise it is left alone."
    )
    session_server: SessionServerUrl = Field(
        "",
        description="Valkey or Redis server where several coordinators keep sessions, with their prompts and answers: "
        "redis://[USER:PASSWORD@]HOST:PORT[/DB], rediss:// for TLS; 'none': none. Needs specd[valkey].",
    )
    shutdown_grace_seconds: Seconds = Field(10.0, description="Time that a stop waits for running sessions.")

    @model_validator(mode="after")
    def _check_one_place_keeps_sessions(self) -> Self:
        if self.session_file and self.session_server:
            raise ValueError("session_file and session_server are both set: leave out one")
        return self

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if self.models and (given := sorted({"target", "draft"} & self.model_fields_set)):
            raise ValueError(f"models and {given[0]} are both set: leave out one")
        return self

    @model_validator(mode="after")
    def _check_canary(self) -> Self:
        if not self.canary_draft:
            return self
        if self.models:
            raise ValueError(f"canary_draft is {self.canary_draft}, and models has several models: leave out one")
        if not self.draft:
            raise ValueError(
                f"canary_draft is {self.canary_draft}, but it needs a draft to be compared with: set draft"
            )
        if both := sorted({*split_addresses(self.canary_draft)} & {*split_addresses(self.draft)}):
            raise ValueError(f"draft and canary_draft both have {', '.join(both)}: name each worker in one of them")
        return self

    @property
    def asks_for_tokens(self) -> bool:
        """Whether clients at `listen` show a token."""
        return bool(self.tokens)

    @property
    def reaches_workers_by_tls(self) -> bool:
        """Whether a worker's address is not a Unix socket, which has no TLS."""
        addresses = split_addresses(",".join(filter(None, (self.target, self.draft, self.canary_draft))))
        return bool(self.tls_ca) and not all(address.startswith("unix:") for address in addresses)

    @property
    def given_num_draft_tokens(self) -> int | None:
        """Draft tokens per round unless a request sets k; None if k is adaptive."""
        return None if self.num_draft_tokens == "auto" else int(self.num_draft_tokens)
