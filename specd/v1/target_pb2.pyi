from specd.v1 import model_pb2 as _model_pb2
from specd.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("round", "position", "token_ids", "proposal", "sampling", "distributions", "source_token_ids", "namespace", "num_draft_tokens", "min_confidences", "adapter")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    round: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    proposal: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SessionSampling
    distributions: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenDistribution]
    source_token_ids: _containers.RepeatedScalarFieldContainer[int]
    namespace: bytes
    num_draft_tokens: int
    min_confidences: _containers.RepeatedScalarFieldContainer[float]
    adapter: str
    def __init__(self, round: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., proposal: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SessionSampling, _Mapping]] = ..., distributions: _Optional[_Iterable[_Union[_sampling_pb2.TokenDistribution, _Mapping]]] = ..., source_token_ids: _Optional[_Iterable[int]] = ..., namespace: _Optional[bytes] = ..., num_draft_tokens: _Optional[int] = ..., min_confidences: _Optional[_Iterable[float]] = ..., adapter: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("round", "num_accepted", "next_token_id", "cached_len", "time", "reused_len", "log_probabilities", "prompt_log_probabilities", "margins", "self_proposal")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    REUSED_LEN_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    SELF_PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    round: int
    num_accepted: int
    next_token_id: int
    cached_len: int
    time: _model_pb2.WorkerTime
    reused_len: int
    log_probabilities: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenLogProbabilities]
    prompt_log_probabilities: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenLogProbabilities]
    margins: _containers.RepeatedCompositeFieldContainer[Margin]
    self_proposal: SelfProposal
    def __init__(self, round: _Optional[int] = ..., num_accepted: _Optional[int] = ..., next_token_id: _Optional[int] = ..., cached_len: _Optional[int] = ..., time: _Optional[_Union[_model_pb2.WorkerTime, _Mapping]] = ..., reused_len: _Optional[int] = ..., log_probabilities: _Optional[_Iterable[_Union[_sampling_pb2.TokenLogProbabilities, _Mapping]]] = ..., prompt_log_probabilities: _Optional[_Iterable[_Union[_sampling_pb2.TokenLogProbabilities, _Mapping]]] = ..., margins: _Optional[_Iterable[_Union[Margin, _Mapping]]] = ..., self_proposal: _Optional[_Union[SelfProposal, _Mapping]] = ...) -> None: ...

class SelfProposal(_message.Message):
    __slots__ = ("token_ids", "confidences", "time", "fault")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    time: _model_pb2.WorkerTime
    fault: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ..., time: _Optional[_Union[_model_pb2.WorkerTime, _Mapping]] = ..., fault: _Optional[str] = ...) -> None: ...

class Margin(_message.Message):
    __slots__ = ("value", "is_near_tie")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    IS_NEAR_TIE_FIELD_NUMBER: _ClassVar[int]
    value: float
    is_near_tie: bool
    def __init__(self, value: _Optional[float] = ..., is_near_tie: _Optional[bool] = ...) -> None: ...
