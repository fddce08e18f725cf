from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("wait_for_whole_fingerprint",)
    WAIT_FOR_WHOLE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    wait_for_whole_fingerprint: bool
    def __init__(self, wait_for_whole_fingerprint: _Optional[bool] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("model", "step_costs", "cache_capacity_bytes", "cache_parts", "bytes_per_source_token", "incarnation", "logit_rounding", "self_draft", "kernel_class", "prefix_cache_bytes", "multiplexes", "version", "protocol")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_PARTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SOURCE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOGIT_ROUNDING_FIELD_NUMBER: _ClassVar[int]
    SELF_DRAFT_FIELD_NUMBER: _ClassVar[int]
    KERNEL_CLASS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MULTIPLEXES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    step_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    cache_capacity_bytes: int
    cache_parts: _containers.RepeatedCompositeFieldContainer[CachePart]
    bytes_per_source_token: int
    incarnation: str
    logit_rounding: float
    self_draft: SelfDraft
    kernel_class: str
    prefix_cache_bytes: int
    multiplexes: bool
    version: str
    protocol: int
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ..., step_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., cache_capacity_bytes: _Optional[int] = ..., cache_parts: _Optional[_Iterable[_Union[CachePart, _Mapping]]] = ..., bytes_per_source_token: _Optional[int] = ..., incarnation: _Optional[str] = ..., logit_rounding: _Optional[float] = ..., self_draft: _Optional[_Union[SelfDraft, _Mapping]] = ..., kernel_class: _Optional[str] = ..., prefix_cache_bytes: _Optional[int] = ..., multiplexes: _Optional[bool] = ..., version: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class SelfDraft(_message.Message):
    __slots__ = ("model", "step_costs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    model: Model
    step_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ..., step_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ...) -> None: ...

class CachePart(_message.Message):
    __slots__ = ("most_tokens", "bytes_per_token")
    MOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    most_tokens: int
    bytes_per_token: int
    def __init__(self, most_tokens: _Optional[int] = ..., bytes_per_token: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("sessions", "width", "seconds")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    width: int
    seconds: float
    def __init__(self, sessions: _Optional[int] = ..., width: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("chunk", "config")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    config: TokenizerConfig
    def __init__(self, chunk: _Optional[bytes] = ..., config: _Optional[_Union[TokenizerConfig, _Mapping]] = ...) -> None: ...

class TokenizerConfig(_message.Message):
    __slots__ = ("chat_template", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "architecture", "fingerprint", "vocabulary_fingerprint", "vocabulary_size", "context_length", "eos_token_ids", "precision", "device", "decoder_start_token_id", "trained_source_length", "whole_fingerprint", "adapters", "parent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DECODER_START_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TRAINED_SOURCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    fingerprint: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    precision: str
    device: str
    decoder_start_token_id: int
    trained_source_length: int
    whole_fingerprint: str
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    parent: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., precision: _Optional[str] = ..., device: _Optional[str] = ..., decoder_start_token_id: _Optional[int] = ..., trained_source_length: _Optional[int] = ..., whole_fingerprint: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., parent: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class WorkerTime(_message.Message):
    __slots__ = ("queue_seconds", "compute_seconds", "num_sessions", "step_tokens")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    compute_seconds: float
    num_sessions: int
    step_tokens: int
    def __init__(self, queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., num_sessions: _Optional[int] = ..., step_tokens: _Optional[int] = ...) -> None: ...
