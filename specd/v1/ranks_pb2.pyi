from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankMessage(_message.Message):
    __slots__ = ("join", "welcome", "meeting", "plan", "ack", "beat", "goodbye")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    welcome: Welcome
    meeting: Meeting
    plan: StepPlan
    ack: StepAck
    beat: Beat
    goodbye: Goodbye
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., meeting: _Optional[_Union[Meeting, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., ack: _Optional[_Union[StepAck, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("versions", "fingerprint", "device", "rank", "data_host", "data_port")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_HOST_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    versions: str
    fingerprint: str
    device: str
    rank: int
    data_host: str
    data_port: int
    def __init__(self, versions: _Optional[str] = ..., fingerprint: _Optional[str] = ..., device: _Optional[str] = ..., rank: _Optional[int] = ..., data_host: _Optional[str] = ..., data_port: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("refusal", "rank", "data_addresses", "backend", "kv_bits", "kv_group_size", "deadline_seconds", "hang_seconds")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    KV_BITS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    rank: int
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    backend: str
    kv_bits: int
    kv_group_size: int
    deadline_seconds: float
    hang_seconds: float
    def __init__(self, refusal: _Optional[str] = ..., rank: _Optional[int] = ..., data_addresses: _Optional[_Iterable[str]] = ..., backend: _Optional[str] = ..., kv_bits: _Optional[int] = ..., kv_group_size: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., hang_seconds: _Optional[float] = ...) -> None: ...

class Meeting(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: str
    def __init__(self, facts: _Optional[str] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step", "operations", "feeds", "deadline_ms")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    step: int
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    feeds: _containers.RepeatedCompositeFieldContainer[PlannedFeed]
    deadline_ms: int
    def __init__(self, step: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., feeds: _Optional[_Iterable[_Union[PlannedFeed, _Mapping]]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("kind", "handle", "source", "position")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Operation.Kind]
        KIND_OPEN: _ClassVar[Operation.Kind]
        KIND_COPY: _ClassVar[Operation.Kind]
        KIND_REWIND: _ClassVar[Operation.Kind]
        KIND_DROP: _ClassVar[Operation.Kind]
    KIND_UNSPECIFIED: Operation.Kind
    KIND_OPEN: Operation.Kind
    KIND_COPY: Operation.Kind
    KIND_REWIND: Operation.Kind
    KIND_DROP: Operation.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    kind: Operation.Kind
    handle: int
    source: int
    position: int
    def __init__(self, kind: _Optional[_Union[Operation.Kind, str]] = ..., handle: _Optional[int] = ..., source: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class PlannedFeed(_message.Message):
    __slots__ = ("handle", "token_ids", "wants_logits")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WANTS_LOGITS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    wants_logits: bool
    def __init__(self, handle: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., wants_logits: _Optional[bool] = ...) -> None: ...

class StepAck(_message.Message):
    __slots__ = ("step", "checksum")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    step: int
    checksum: int
    def __init__(self, step: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("available_bytes", "whole_fingerprint")
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    available_bytes: int
    whole_fingerprint: str
    def __init__(self, available_bytes: _Optional[int] = ..., whole_fingerprint: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
