from specd.v1 import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "max_tokens", "num_draft_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    max_tokens: int
    num_draft_tokens: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., max_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("session_id", "text", "tokens", "round", "finish_reason", "statistics")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    round: Round
    finish_reason: FinishReason
    statistics: SessionStatistics
    def __init__(self, session_id: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., statistics: _Optional[_Union[SessionStatistics, _Mapping]] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("id", "text", "drafted")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    drafted: bool
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., drafted: _Optional[bool] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("proposed", "accepted", "draft_seconds", "verify_seconds", "queue_seconds", "wire_seconds", "coordinator_seconds")
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    proposed: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float
    def __init__(self, proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., wire_seconds: _Optional[float] = ..., coordinator_seconds: _Optional[float] = ...) -> None: ...

class SessionStatistics(_message.Message):
    __slots__ = ("prompt_tokens", "generated_tokens", "rounds", "proposed_tokens", "accepted_tokens", "accepted_by_position", "recovered_tokens", "bonus_tokens", "time_to_first_token_seconds", "decode_seconds", "round_averages", "rounds_without_draft", "draft_fault", "target_replays")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BONUS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_AVERAGES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_WITHOUT_DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FAULT_FIELD_NUMBER: _ClassVar[int]
    TARGET_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    generated_tokens: int
    rounds: int
    proposed_tokens: int
    accepted_tokens: int
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    recovered_tokens: int
    bonus_tokens: int
    time_to_first_token_seconds: float
    decode_seconds: float
    round_averages: RoundAverages
    rounds_without_draft: int
    draft_fault: str
    target_replays: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., recovered_tokens: _Optional[int] = ..., bonus_tokens: _Optional[int] = ..., time_to_first_token_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., round_averages: _Optional[_Union[RoundAverages, _Mapping]] = ..., rounds_without_draft: _Optional[int] = ..., draft_fault: _Optional[str] = ..., target_replays: _Optional[int] = ...) -> None: ...

class RoundAverages(_message.Message):
    __slots__ = ("draft_seconds", "verify_seconds", "queue_seconds", "wire_seconds", "coordinator_seconds", "tokens")
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float
    tokens: float
    def __init__(self, draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., wire_seconds: _Optional[float] = ..., coordinator_seconds: _Optional[float] = ..., tokens: _Optional[float] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("target", "draft", "draft_fault", "default_num_draft_tokens", "max_num_draft_tokens")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FAULT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    target: _model_pb2.Model
    draft: _model_pb2.Model
    draft_fault: str
    default_num_draft_tokens: int
    max_num_draft_tokens: int
    def __init__(self, target: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., draft: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., draft_fault: _Optional[str] = ..., default_num_draft_tokens: _Optional[int] = ..., max_num_draft_tokens: _Optional[int] = ...) -> None: ...
