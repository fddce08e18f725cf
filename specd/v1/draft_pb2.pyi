from specd.v1 import model_pb2 as _model_pb2
from specd.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposeRequest(_message.Message):
    __slots__ = ("round", "position", "token_ids", "num_draft_tokens", "sampling", "min_confidences", "source_token_ids", "namespace", "adapter")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    round: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    sampling: _sampling_pb2.SessionSampling
    min_confidences: _containers.RepeatedScalarFieldContainer[float]
    source_token_ids: _containers.RepeatedScalarFieldContainer[int]
    namespace: bytes
    adapter: str
    def __init__(self, round: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SessionSampling, _Mapping]] = ..., min_confidences: _Optional[_Iterable[float]] = ..., source_token_ids: _Optional[_Iterable[int]] = ..., namespace: _Optional[bytes] = ..., adapter: _Optional[str] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("round", "token_ids", "cached_len", "time", "reused_len", "distributions", "confidences")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    REUSED_LEN_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    round: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_len: int
    time: _model_pb2.WorkerTime
    reused_len: int
    distributions: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenDistribution]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, round: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., cached_len: _Optional[int] = ..., time: _Optional[_Union[_model_pb2.WorkerTime, _Mapping]] = ..., reused_len: _Optional[int] = ..., distributions: _Optional[_Iterable[_Union[_sampling_pb2.TokenDistribution, _Mapping]]] = ..., confidences: _Optional[_Iterable[float]] = ...) -> None: ...
