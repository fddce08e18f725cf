from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcceptanceMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_METHOD_UNSPECIFIED: _ClassVar[AcceptanceMethod]
    ACCEPTANCE_METHOD_COUPLED: _ClassVar[AcceptanceMethod]
    ACCEPTANCE_METHOD_REJECTION: _ClassVar[AcceptanceMethod]
ACCEPTANCE_METHOD_UNSPECIFIED: AcceptanceMethod
ACCEPTANCE_METHOD_COUPLED: AcceptanceMethod
ACCEPTANCE_METHOD_REJECTION: AcceptanceMethod

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_context_size", "logit_bias", "seed", "acceptance", "lenience")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PENALTY_CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_context_size: int
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    acceptance: AcceptanceMethod
    lenience: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., penalty_context_size: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., acceptance: _Optional[_Union[AcceptanceMethod, str]] = ..., lenience: _Optional[float] = ...) -> None: ...

class SessionSampling(_message.Message):
    __slots__ = ("parameters", "suppressed_token_ids", "suppressed_before", "top_log_probabilities", "vocabulary_size", "prompt_log_probabilities", "grammar")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    parameters: SamplingParameters
    suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    suppressed_before: int
    top_log_probabilities: int
    vocabulary_size: int
    prompt_log_probabilities: bool
    grammar: SessionGrammar
    def __init__(self, parameters: _Optional[_Union[SamplingParameters, _Mapping]] = ..., suppressed_token_ids: _Optional[_Iterable[int]] = ..., suppressed_before: _Optional[int] = ..., top_log_probabilities: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., prompt_log_probabilities: _Optional[bool] = ..., grammar: _Optional[_Union[SessionGrammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: _empty_pb2.Empty
    regex: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[_Union[_empty_pb2.Empty, _Mapping]] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class SessionGrammar(_message.Message):
    __slots__ = ("grammar", "begins_at", "reasoning_end", "reasoning_begin", "is_reasoning_open")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BEGINS_AT_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    REASONING_BEGIN_FIELD_NUMBER: _ClassVar[int]
    IS_REASONING_OPEN_FIELD_NUMBER: _ClassVar[int]
    grammar: Grammar
    begins_at: int
    reasoning_end: int
    reasoning_begin: int
    is_reasoning_open: bool
    def __init__(self, grammar: _Optional[_Union[Grammar, _Mapping]] = ..., begins_at: _Optional[int] = ..., reasoning_end: _Optional[int] = ..., reasoning_begin: _Optional[int] = ..., is_reasoning_open: _Optional[bool] = ...) -> None: ...

class TokenDistribution(_message.Message):
    __slots__ = ("token_ids", "probabilities")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    probabilities: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., probabilities: _Optional[bytes] = ...) -> None: ...

class TokenLogProbabilities(_message.Message):
    __slots__ = ("model", "sampling", "top_model", "top_sampling")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOP_MODEL_FIELD_NUMBER: _ClassVar[int]
    TOP_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    model: float
    sampling: float
    top_model: _containers.RepeatedCompositeFieldContainer[RankedToken]
    top_sampling: _containers.RepeatedCompositeFieldContainer[RankedToken]
    def __init__(self, model: _Optional[float] = ..., sampling: _Optional[float] = ..., top_model: _Optional[_Iterable[_Union[RankedToken, _Mapping]]] = ..., top_sampling: _Optional[_Iterable[_Union[RankedToken, _Mapping]]] = ...) -> None: ...

class RankedToken(_message.Message):
    __slots__ = ("id", "text", "log_probability", "own_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    log_probability: float
    own_bytes: bytes
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., log_probability: _Optional[float] = ..., own_bytes: _Optional[bytes] = ...) -> None: ...
