"""Requests of all kinds, and their answers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specd.bench.prompts import load_prompts
from specd.client import AsyncClient, Delta, Finished
from specd.settings import EMBEDDED_TARGET
from specd.text.tokenizer import Tokenizer
from specd.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Request:
    """The prompts of its turns, as token ids, and how its tokens are chosen."""

    turns: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass
class Answer:
    """Tokens of all turns, the server's statistics of each, and the longest time between two messages, seconds."""

    token_ids: list[int] = field(default_factory=list)
    statistics: list[pb.SessionStatistics] = field(default_factory=list)
    num_resumptions: int = 0
    longest_gap: float = 0.0
    _last_at: float = 0.0

    def begin_turn(self) -> None:
        """Begin to wait for the first message of a turn, which is no gap."""
        self._last_at = 0.0

    def add(self, token_ids: Sequence[int]) -> None:
        """Take the tokens of a message that has just come."""
        now = time.perf_counter()
        self.longest_gap = max(self.longest_gap, now - (self._last_at or now))
        self._last_at = now
        self.token_ids.extend(token_ids)


def make_requests(rng: random.Random, count: int) -> list[Request]:
    """Return requests: greedy and sampled, short and long, of one turn and of two."""
    tokenizer = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes())
    ids = tokenizer.encode("\n".join(load_prompts().values()))

    def piece(fewest: int, most: int) -> tuple[int, ...]:
        length = rng.randint(fewest, most)
        begin = rng.randrange(len(ids) - length)
        return tuple(ids[begin : begin + length])

    requests = []
    for number in range(count):
        prompt = piece(600, 1200) if number % 8 == 7 else piece(20, 300)
        turns = (prompt, piece(5, 40)) if number % 4 == 3 else (prompt,)
        temperature = (0.0, 0.7, 1.0)[number % 3]
        requests.append(Request(turns, rng.randint(24, 96), temperature, rng.getrandbits(32)))
    return requests


async def ask(client: AsyncClient, request: Request, on_message: Callable[[], None] = lambda: None) -> Answer:
    """Return the answer of a client that gives up at once, by the retries of `client`. Raises SpecdError."""
    answer, session_id = Answer(), ""
    for turn in request.turns:
        answer.begin_turn()
        session = client.session(session_id)
        stream = session.generate(
            turn,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=True,
        )
        async for response in stream.messages():
            session_id = response.session_id
            answer.add([token.id for token in response.tokens])
            on_message()
        answer.statistics.append(response.statistics)
    return answer


async def ask_patiently(client: AsyncClient, request: Request, on_message: Callable[[], None]) -> Answer:
    """Return the answer of a client that resumes what breaks. Raises SpecdError."""
    answer = Answer()
    async with client.session() as session:
        for turn in request.turns:
            answer.begin_turn()
            stream = session.generate(
                turn,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                ignore_eos=True,
            )
            async for event in stream:
                if isinstance(event, Delta):
                    answer.add([token.id for token in event.tokens])
                    on_message()
                elif isinstance(event, Finished):
                    answer.num_resumptions += event.statistics.num_resumptions
    return answer
