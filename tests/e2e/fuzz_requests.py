"""Requests with all that can be wrong with them, for every method of the three processes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from specd.v1 import draft_pb2, generation_pb2, model_pb2, multiplex_pb2, sampling_pb2, session_pb2, target_pb2

VOCABULARY_SIZE = 8192
PROMPT = "def fibonacci(n):"

_FILES = {
    "coordinator": (generation_pb2, session_pb2, health_pb2, reflection_pb2),
    "draft": (draft_pb2, model_pb2, multiplex_pb2, health_pb2, reflection_pb2),
    "target": (target_pb2, model_pb2, multiplex_pb2, health_pb2, reflection_pb2),
}
_SESSIONS = (("Draft", draft_pb2), ("Target", target_pb2))
METHODS: list[tuple[str, MethodDescriptor]] = [
    (process, method)
    for process, files in _FILES.items()
    for file in files
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    # Our own methods four times as often as those that gRPC brings.
    for _ in range(4 if service.full_name.startswith("specd.") else 1)
]


class RequestGenerator:
    """Makes requests, as bytes, from a seed."""

    def __init__(self, seed: str, session_ids: Sequence[str]) -> None:
        self.random = random.Random(seed)
        self._session_ids = session_ids

    def session_id(self) -> str:
        """Return the id of a session that there is, or was."""
        return self.random.choice(self._session_ids)

    def request(self, method: MethodDescriptor) -> bytes:
        """Return bytes that are a request of a method, or nearly so, or nothing of the kind."""
        kind = self.random.random()
        if kind < 0.25:
            return self.some_bytes()
        message = self.random_message(method) if kind < 0.4 else self.valid_message(method)
        data = message.SerializeToString()
        return self.mutated(data) if kind < 0.7 else data

    def random_message(self, method: MethodDescriptor) -> Message:
        """Return a request with any values in its fields."""
        message: Message = GetMessageClass(method.input_type)()
        self._fill(message, depth=0)
        return message

    def valid_message(self, method: MethodDescriptor) -> Message:
        """Return a request that is mostly answered."""
        pick, upto = self.random.choice, self.random.randrange
        name = method.input_type.name
        tokens = [upto(VOCABULARY_SIZE) for _ in range(1 + upto(12))]
        if name == "GenerateRequest":
            request = generation_pb2.GenerateRequest(
                max_tokens=1 + upto(4), session_id=pick(["", "", self.session_id()])
            )
            if upto(2):
                request.num_draft_tokens = upto(8)
            if upto(2):
                request.sampling.CopyFrom(self._sampling())
            if upto(4) == 0:
                request.top_log_probabilities = upto(20)
            request.echo = upto(4) == 0
            if upto(4) == 0:
                request.stop.CopyFrom(generation_pb2.StopConditions(strings=["\n", "é"], token_ids=tokens))
            if upto(3) == 0:
                request.token_ids.ids.extend(tokens)
            else:
                request.text = pick([PROMPT, "x", "größe = 'ü'", "\u202e", "a" * 50])
            return request
        position = pick([0, 0, 0, 0, 0, 1, upto(30)])
        sampling = sampling_pb2.SessionSampling(parameters=self._sampling()) if upto(3) == 0 else None
        if name == "ProposeRequest":
            return draft_pb2.ProposeRequest(
                round=upto(100),
                position=position,
                token_ids=tokens,
                num_draft_tokens=upto(6),
                sampling=sampling,
                min_confidences=[self.random.random() for _ in range(upto(4))],
            )
        if name == "VerifyRequest":
            proposal = [upto(VOCABULARY_SIZE) for _ in range(upto(6))]
            return target_pb2.VerifyRequest(
                round=upto(100), position=position, token_ids=tokens, proposal=proposal, sampling=sampling
            )
        if name == "MultiplexRequest":
            return self._multiplexed()
        if name in {"GetSessionRequest", "DeleteSessionRequest"}:
            request_class: Any = GetMessageClass(method.input_type)
            session: Message = request_class(session_id=self.session_id())
            return session
        if name == "HealthCheckRequest":
            return health_pb2.HealthCheckRequest(service=pick(["", "specd.v1.DraftService", "nosuch"]))
        if name == "ServerReflectionRequest":
            fields = [
                {"list_services": ""},
                {"file_containing_symbol": "specd.v1.ModelService"},
                {"file_by_filename": "x"},
            ]
            return reflection_pb2.ServerReflectionRequest(**cast(Any, pick(fields)))
        empty: Message = GetMessageClass(method.input_type)()
        return empty

    def _multiplexed(self) -> Message:
        """Return frames of a few sessions, most of them in an order that is right, with requests of either worker."""
        pick, frames = self.random.choice, list[multiplex_pb2.Frame]()
        methods = [file.DESCRIPTOR.services_by_name[f"{name}Service"].methods[0] for name, file in _SESSIONS]
        for stream in range(1 + self.random.randrange(3)):
            frames.append(multiplex_pb2.Frame(stream=stream, session_id="fuzzed"))
            for _ in range(self.random.randrange(3)):
                data = self.valid_message(pick(methods)).SerializeToString()
                frames.append(multiplex_pb2.Frame(stream=stream, message=pick([data, data, self.mutated(data)])))
            frames.append(multiplex_pb2.Frame(stream=stream, end=multiplex_pb2.End(code=pick([0, 0, 1, 99]))))
        if self.random.random() < 0.2:
            self.random.shuffle(frames)
        return multiplex_pb2.MultiplexRequest(frames=frames)

    def _sampling(self) -> sampling_pb2.SamplingParameters:
        pick = self.random.choice
        return sampling_pb2.SamplingParameters(
            temperature=pick([0, 0.7, 1, 100]),
            top_k=pick([0, 1, 40]),
            top_p=pick([1, 0.9]),
            seed=self.random.getrandbits(64),
            repetition_penalty=pick([1, 1.1, 10]),
            logit_bias={self.random.randrange(VOCABULARY_SIZE): pick([-100, 100])},
            acceptance=cast(Any, pick([0, 1, 2])),
        )

    def _fill(self, message: Any, depth: int) -> None:
        for descriptor in message.DESCRIPTOR.fields:
            if self.random.random() < (0.5 if depth < 3 else 0.9):
                continue
            target = getattr(message, descriptor.name)
            if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
                key, value = descriptor.message_type.fields
                for _ in range(self._size()):
                    if value.message_type is not None:
                        self._fill(target[self._value(key)], depth + 1)
                    else:
                        target[self._value(key)] = self._value(value)
            elif descriptor.is_repeated and descriptor.message_type is not None:
                for _ in range(min(self._size(), 20)):
                    self._fill(target.add(), depth + 1)
            elif descriptor.is_repeated:
                target.extend(self._value(descriptor) for _ in range(self._size()))
            elif descriptor.message_type is not None:
                target.SetInParent()
                self._fill(target, depth + 1)
            else:
                setattr(message, descriptor.name, self._value(descriptor))

    def _size(self) -> int:
        return self.random.choice([0, 1, 1, 2, 3, 7, 40] + [5000] * (self.random.random() < 0.01))

    def _value(self, descriptor: FieldDescriptor) -> Any:
        pick = self.random.choice
        kind = descriptor.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if descriptor.type == FieldDescriptor.TYPE_BYTES:
                return self.some_bytes()
            return pick(
                [
                    "",
                    "a",
                    "specd.v1.DraftService",
                    "\0",
                    "\ud7ff\u202e\U0010ffff",
                    "x" * pick([300, 20_000]),
                    self.session_id(),
                ]
            )
        if kind in {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}:
            return pick([0.0, 0.5, 1.0, -1.0, 2.0, 1e-40, 3e38, float("nan"), float("inf"), -float("inf")])
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return pick([False, True])
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return pick([0, 1, 2, 3, -1, 2**31 - 1])
        bits = 64 if kind in {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64} else 32
        if kind in {FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64}:
            return pick([0, 1, 2, 5, 32, 33, 2048, 8191, 8192, 2**31, 2**bits - 1])
        return pick([0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1))])

    def some_bytes(self) -> bytes:
        """Return bytes that mean nothing."""
        return self.random.randbytes(
            self.random.choice([0, 1, 2, 3, 5, 8, 13, 40, 200] + [100_000] * (self.random.random() < 0.01))
        )

    def mutated(self, data: bytes) -> bytes:
        """Return bytes with some of them changed, lost, or repeated."""
        mutated = bytearray(data)
        for _ in range(self.random.choice([1, 1, 2, 5])):
            at, end = sorted(self.random.randrange(len(mutated) + 1) for _ in range(2))
            match self.random.randrange(5):
                case 0 if at < len(mutated):
                    mutated[at] ^= 1 << self.random.randrange(8)
                case 1:
                    del mutated[at:end]
                case 2:
                    mutated[at:at] = mutated[at:end]
                case 3:
                    mutated[at:at] = self.random.randbytes(self.random.randrange(1, 5))
                case _:
                    del mutated[at:]
        return bytes(mutated)
