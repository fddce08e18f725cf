from google.protobuf import struct_pb2 as _struct_pb2
from specd.v1 import model_pb2 as _model_pb2
from specd.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_SOURCE_UNSPECIFIED: _ClassVar[DraftSource]
    DRAFT_SOURCE_MODEL: _ClassVar[DraftSource]
    DRAFT_SOURCE_LOOKUP: _ClassVar[DraftSource]
    DRAFT_SOURCE_NONE: _ClassVar[DraftSource]

class TokenSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_SOURCE_UNSPECIFIED: _ClassVar[TokenSource]
    TOKEN_SOURCE_TARGET: _ClassVar[TokenSource]
    TOKEN_SOURCE_DRAFT: _ClassVar[TokenSource]
    TOKEN_SOURCE_LOOKUP: _ClassVar[TokenSource]
    TOKEN_SOURCE_PREDICTION: _ClassVar[TokenSource]
    TOKEN_SOURCE_FORCED: _ClassVar[TokenSource]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_UNLOADED: _ClassVar[ModelState]
    MODEL_STATE_WAITING: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_LEAVING: _ClassVar[ModelState]
DRAFT_SOURCE_UNSPECIFIED: DraftSource
DRAFT_SOURCE_MODEL: DraftSource
DRAFT_SOURCE_LOOKUP: DraftSource
DRAFT_SOURCE_NONE: DraftSource
TOKEN_SOURCE_UNSPECIFIED: TokenSource
TOKEN_SOURCE_TARGET: TokenSource
TOKEN_SOURCE_DRAFT: TokenSource
TOKEN_SOURCE_LOOKUP: TokenSource
TOKEN_SOURCE_PREDICTION: TokenSource
TOKEN_SOURCE_FORCED: TokenSource
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_UNLOADED: ModelState
MODEL_STATE_WAITING: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_LEAVING: ModelState

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "max_tokens", "num_draft_tokens", "sampling", "stop", "top_log_probabilities", "session_id", "answer_text", "answer_token_ids", "draft_source", "prediction_text", "prediction_token_ids", "cut_max_tokens", "resumption", "return_prompt_token_ids", "echo", "grammar", "model", "refuse_unloaded")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TEXT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TEXT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CUT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMPTION_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REFUSE_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: Chat
    max_tokens: int
    num_draft_tokens: int
    sampling: _sampling_pb2.SamplingParameters
    stop: StopConditions
    top_log_probabilities: int
    session_id: str
    answer_text: str
    answer_token_ids: TokenIds
    draft_source: DraftSource
    prediction_text: str
    prediction_token_ids: TokenIds
    cut_max_tokens: bool
    resumption: Resumption
    return_prompt_token_ids: bool
    echo: bool
    grammar: _sampling_pb2.Grammar
    model: str
    refuse_unloaded: bool
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., max_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParameters, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., top_log_probabilities: _Optional[int] = ..., session_id: _Optional[str] = ..., answer_text: _Optional[str] = ..., answer_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., draft_source: _Optional[_Union[DraftSource, str]] = ..., prediction_text: _Optional[str] = ..., prediction_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., cut_max_tokens: _Optional[bool] = ..., resumption: _Optional[_Union[Resumption, _Mapping]] = ..., return_prompt_token_ids: _Optional[bool] = ..., echo: _Optional[bool] = ..., grammar: _Optional[_Union[_sampling_pb2.Grammar, _Mapping]] = ..., model: _Optional[str] = ..., refuse_unloaded: _Optional[bool] = ...) -> None: ...

class Resumption(_message.Message):
    __slots__ = ("token_ids", "prompt_fingerprint", "session_token_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_fingerprint: str
    session_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., prompt_fingerprint: _Optional[str] = ..., session_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SourceCounts(_message.Message):
    __slots__ = ("proposed", "accepted")
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    proposed: int
    accepted: int
    def __init__(self, proposed: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools", "template_arguments", "continue_final_message", "tools_json", "template_arguments_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Struct]
    template_arguments: _struct_pb2.Struct
    continue_final_message: bool
    tools_json: str
    template_arguments_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[_struct_pb2.Struct, _Mapping]]] = ..., template_arguments: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., continue_final_message: _Optional[bool] = ..., tools_json: _Optional[str] = ..., template_arguments_json: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "fields", "fields_json", "special_tokens")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    fields: _struct_pb2.Struct
    fields_json: str
    special_tokens: _containers.RepeatedCompositeFieldContainer[PlacedToken]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., fields: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., fields_json: _Optional[str] = ..., special_tokens: _Optional[_Iterable[_Union[PlacedToken, _Mapping]]] = ...) -> None: ...

class PlacedToken(_message.Message):
    __slots__ = ("id", "position")
    ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    id: int
    position: int
    def __init__(self, id: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("ignore_eos", "min_tokens", "token_ids", "strings", "reasoning")
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    ignore_eos: bool
    min_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    reasoning: Reasoning
    def __init__(self, ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., strings: _Optional[_Iterable[str]] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: str
    end: str
    def __init__(self, begin: _Optional[str] = ..., end: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("session_id", "text", "tokens", "round", "finish_reason", "statistics", "stop_token_id", "stop_string", "seed", "prompt_end", "prompt_fingerprint", "prompt_token_ids", "source_token_ids", "prompt_tokens", "max_tokens", "loading")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    round: Round
    finish_reason: FinishReason
    statistics: SessionStatistics
    stop_token_id: int
    stop_string: str
    seed: int
    prompt_end: str
    prompt_fingerprint: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    source_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    max_tokens: int
    loading: LoadProgress
    def __init__(self, session_id: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., statistics: _Optional[_Union[SessionStatistics, _Mapping]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_end: _Optional[str] = ..., prompt_fingerprint: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., source_token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., max_tokens: _Optional[int] = ..., loading: _Optional[_Union[LoadProgress, _Mapping]] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("process", "stage", "done_bytes", "total_bytes")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    process: str
    stage: str
    done_bytes: int
    total_bytes: int
    def __init__(self, process: _Optional[str] = ..., stage: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("id", "text", "drafted", "log_probabilities", "source", "special_position", "margin", "near_tie", "own_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_POSITION_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    NEAR_TIE_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    drafted: bool
    log_probabilities: _sampling_pb2.TokenLogProbabilities
    source: TokenSource
    special_position: int
    margin: float
    near_tie: bool
    own_bytes: bytes
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., drafted: _Optional[bool] = ..., log_probabilities: _Optional[_Union[_sampling_pb2.TokenLogProbabilities, _Mapping]] = ..., source: _Optional[_Union[TokenSource, str]] = ..., special_position: _Optional[int] = ..., margin: _Optional[float] = ..., near_tie: _Optional[bool] = ..., own_bytes: _Optional[bytes] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("proposed", "accepted", "draft_seconds", "verify_seconds", "queue_seconds", "wire_seconds", "coordinator_seconds", "wire_bytes", "sources")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SourceCounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SourceCounts, _Mapping]] = ...) -> None: ...
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    proposed: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float
    wire_bytes: int
    sources: _containers.MessageMap[str, SourceCounts]
    def __init__(self, proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., wire_seconds: _Optional[float] = ..., coordinator_seconds: _Optional[float] = ..., wire_bytes: _Optional[int] = ..., sources: _Optional[_Mapping[str, SourceCounts]] = ...) -> None: ...

class SessionStatistics(_message.Message):
    __slots__ = ("prompt_tokens", "generated_tokens", "rounds", "proposed_tokens", "accepted_tokens", "accepted_by_position", "recovered_tokens", "bonus_tokens", "time_to_first_token_seconds", "decode_seconds", "round_averages", "rounds_without_draft", "draft_fault", "target_replays", "admission_seconds", "proposed_by_position", "wasted_tokens", "target_reused_tokens", "draft_reused_tokens", "speedup", "sources", "near_ties", "smallest_margin", "smallest_margin_position")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SourceCounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SourceCounts, _Mapping]] = ...) -> None: ...
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
    ADMISSION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NEAR_TIES_FIELD_NUMBER: _ClassVar[int]
    SMALLEST_MARGIN_FIELD_NUMBER: _ClassVar[int]
    SMALLEST_MARGIN_POSITION_FIELD_NUMBER: _ClassVar[int]
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
    admission_seconds: float
    proposed_by_position: _containers.RepeatedScalarFieldContainer[int]
    wasted_tokens: int
    target_reused_tokens: int
    draft_reused_tokens: int
    speedup: float
    sources: _containers.MessageMap[str, SourceCounts]
    near_ties: int
    smallest_margin: float
    smallest_margin_position: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., recovered_tokens: _Optional[int] = ..., bonus_tokens: _Optional[int] = ..., time_to_first_token_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., round_averages: _Optional[_Union[RoundAverages, _Mapping]] = ..., rounds_without_draft: _Optional[int] = ..., draft_fault: _Optional[str] = ..., target_replays: _Optional[int] = ..., admission_seconds: _Optional[float] = ..., proposed_by_position: _Optional[_Iterable[int]] = ..., wasted_tokens: _Optional[int] = ..., target_reused_tokens: _Optional[int] = ..., draft_reused_tokens: _Optional[int] = ..., speedup: _Optional[float] = ..., sources: _Optional[_Mapping[str, SourceCounts]] = ..., near_ties: _Optional[int] = ..., smallest_margin: _Optional[float] = ..., smallest_margin_position: _Optional[int] = ...) -> None: ...

class RoundAverages(_message.Message):
    __slots__ = ("draft_seconds", "verify_seconds", "queue_seconds", "wire_seconds", "coordinator_seconds", "tokens", "wire_bytes")
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float
    tokens: float
    wire_bytes: float
    def __init__(self, draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., wire_seconds: _Optional[float] = ..., coordinator_seconds: _Optional[float] = ..., tokens: _Optional[float] = ..., wire_bytes: _Optional[float] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("generation", "return_token_ids", "without_special_tokens")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    generation: GenerateRequest
    return_token_ids: bool
    without_special_tokens: bool
    def __init__(self, generation: _Optional[_Union[GenerateRequest, _Mapping]] = ..., return_token_ids: _Optional[bool] = ..., without_special_tokens: _Optional[bool] = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("prompt_tokens", "source_tokens", "room", "fits", "token_ids")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    source_tokens: int
    room: int
    fits: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_tokens: _Optional[int] = ..., source_tokens: _Optional[int] = ..., room: _Optional[int] = ..., fits: _Optional[bool] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "model")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    model: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "statuses")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[_model_pb2.Model]
    statuses: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    def __init__(self, models: _Optional[_Iterable[_Union[_model_pb2.Model, _Mapping]]] = ..., statuses: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "state", "loading", "memory_bytes", "pinned", "active_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ModelState
    loading: LoadProgress
    memory_bytes: int
    pinned: bool
    active_requests: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., loading: _Optional[_Union[LoadProgress, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., pinned: _Optional[bool] = ..., active_requests: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model", "refuse_unloaded", "session_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REFUSE_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    refuse_unloaded: bool
    session_id: str
    def __init__(self, model: _Optional[str] = ..., refuse_unloaded: _Optional[bool] = ..., session_id: _Optional[str] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("target", "draft", "draft_fault", "default_num_draft_tokens", "max_num_draft_tokens", "sources", "chat_template", "special_tokens", "version", "protocol")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FAULT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    target: _model_pb2.Model
    draft: _model_pb2.Model
    draft_fault: str
    default_num_draft_tokens: int
    max_num_draft_tokens: int
    sources: _containers.RepeatedScalarFieldContainer[str]
    chat_template: str
    special_tokens: _containers.ScalarMap[int, str]
    version: str
    protocol: int
    def __init__(self, target: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., draft: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., draft_fault: _Optional[str] = ..., default_num_draft_tokens: _Optional[int] = ..., max_num_draft_tokens: _Optional[int] = ..., sources: _Optional[_Iterable[str]] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[int, str]] = ..., version: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...
