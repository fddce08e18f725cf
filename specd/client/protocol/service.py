"""What a coordinator says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specd.client.events import Loading
from specd.client.protocol.wire import loading_from
from specd.model_info import ModelInfo
from specd.protocol import check_protocol_of
from specd.rpc.messages import model_from
from specd.v1 import generation_pb2


@dataclass(frozen=True)
class ServiceDescription:
    """The models behind a coordinator, and the limits of a request; generation.proto explains the fields.

    `draft` is None while there is none, and `draft_fault` then says why. `default_num_draft_tokens` is None if k is
    chosen in each round. A request can name the target's `adapters` as its model. `sources` may propose tokens.
    `chat_template` is "" of a model that does not chat. `special_tokens` are the target's, by id. `version` is the
    coordinator's version of specd.
    """

    target: ModelInfo
    draft: ModelInfo | None
    draft_fault: str
    default_num_draft_tokens: int | None
    max_num_draft_tokens: int
    sources: tuple[str, ...]
    chat_template: str = ""
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    version: str = ""


@dataclass(frozen=True)
class ModelStatus:
    """One of several models of a coordinator; generation.proto explains the fields.

    `state` is unloaded, waiting, loading, ready or leaving.
    """

    name: str
    state: str
    loading: Loading | None
    memory_bytes: int
    pinned: bool
    active_requests: int


@dataclass(frozen=True)
class TokenCount:
    """Tokens that a generation would begin with, and what there is room for; generation.proto explains the fields."""

    prompt_tokens: int
    source_tokens: int
    room: int
    fits: bool
    token_ids: tuple[int, ...] = ()


def status_from(status: generation_pb2.ModelStatus) -> ModelStatus:
    """Return the state in a message."""
    return ModelStatus(
        status.name,
        generation_pb2.ModelState.Name(status.state).removeprefix("MODEL_STATE_").lower(),
        loading_from(status.loading) if status.HasField("loading") else None,
        status.memory_bytes,
        status.pinned,
        status.active_requests,
    )


def counted(response: generation_pb2.CountTokensResponse) -> TokenCount:
    """Return the count in a message."""
    token_ids = tuple(response.token_ids)
    return TokenCount(response.prompt_tokens, response.source_tokens, response.room, response.fits, token_ids)


def described(response: generation_pb2.GetModelInfoResponse) -> ServiceDescription:
    """Return the description in a message. Raises ProtocolMismatchError for another protocol."""
    check_protocol_of("the coordinator", response.version, response.protocol)
    has_default = response.HasField("default_num_draft_tokens")
    return ServiceDescription(
        target=model_from(response.target),
        draft=model_from(response.draft) if response.HasField("draft") else None,
        draft_fault=response.draft_fault,
        default_num_draft_tokens=response.default_num_draft_tokens if has_default else None,
        max_num_draft_tokens=response.max_num_draft_tokens,
        sources=tuple(response.sources),
        chat_template=response.chat_template,
        special_tokens=dict(response.special_tokens),
        version=response.version,
    )
