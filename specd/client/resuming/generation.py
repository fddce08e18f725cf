"""One generation, over as many streams as it takes. No connection, no clock: these come in as arguments."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from specd.client.events import Completion, CompletionToken, Delta, Event, Finished, Retrying
from specd.client.options import GenerationOptions
from specd.client.protocol.errors import client_closed
from specd.client.protocol.wire import delta_from, loading_from
from specd.client.resuming.retries import RetryPolicy
from specd.client.statistics import EarlierParts
from specd.errors import SpecdError, UnavailableError
from specd.v1 import generation_pb2, sampling_pb2
from specd.vocabulary import sums_by_source

# A target that was lost five times under a session may be lost by its request: the other sessions must live.
_MOST_TARGET_LOSSES = 1


@dataclass
class Connection:
    """What a client knows of its connection: whether the server ever answered on it, and whether it is closed."""

    has_answered: bool = False
    is_closed: bool = False


@dataclass(frozen=True)
class Turn:
    """What to ask for; the same without the session on the server, if it has one; and what to do when it has come."""

    request: generation_pb2.GenerateRequest
    restored: generation_pb2.GenerateRequest | None = None
    keep: Callable[[ResumableGeneration, Completion], None] = lambda generation, completion: None


class ResumableGeneration:
    """Says what to ask for next, and takes what comes.

    A stream that breaks is asked for again, from behind the tokens that came and with their seed. By COUPLED the whole
    is what an undisturbed stream would have brought, because a token depends on the seed, its position and those before
    it alone.

    A turn of a session is asked for again as `restored`, which is the same without the session on the server: that may
    be lost, or have the turn already, whose last message did not arrive. Without `restored` such a turn is not resumed.
    """

    def __init__(
        self,
        turn: Turn,
        *,
        policy: RetryPolicy,
        clock: Callable[[], float],
        chance: Callable[[], float],
        connection: Connection,
        keeps_tokens: bool = True,
        options: GenerationOptions | None = None,
    ) -> None:
        """Make this turn; `chance` gives numbers in [0, 1), `clock` the time in seconds, `options` the text's form.

        Without `keeps_tokens` the tokens are in the events alone, and `turn.keep` is not called.
        """
        self.connection = connection
        self.tokens: list[CompletionToken] = []
        self.session_id = ""
        self.seed = 0
        self.prompt_token_ids: tuple[int, ...] = ()
        self.source_token_ids: tuple[int, ...] = ()
        self.completion: Completion | None = None
        self._request = turn.request.SerializeToString()
        self._restored = turn.restored.SerializeToString() if turn.restored is not None else None
        self._continues_session = bool(turn.request.session_id)
        self._token_ids = array("I")
        self._keep = turn.keep if keeps_tokens else None
        self._policy = policy
        self._clock = clock
        self._chance = chance
        self._schema = (options or {}).get("schema")
        self._reasoning_end = ((options or {}).get("reasoning") or ("", ""))[1]
        self._fingerprint = ""
        self._earlier = EarlierParts()
        self._part = EarlierParts()
        self._num_failures = 0
        self._num_target_losses = 0
        self._started_at = self._progress_at = self._failing_since = clock()
        self._first_token_at: float | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(token.text for token in self.tokens)

    def next_request(self) -> bytes:
        """Return what to ask for now, serialised: the generation, or the rest of it.

        Raises CallError once the client is closed.
        """
        if self.connection.is_closed:
            raise client_closed()
        if not self._token_ids:
            return self._request
        # Serialised messages one after the other are one message, in which the later fields count.
        rest = generation_pb2.GenerateRequest(
            sampling=sampling_pb2.SamplingParameters(seed=self.seed),
            resumption=generation_pb2.Resumption(token_ids=self._token_ids, prompt_fingerprint=self._fingerprint),
        )
        return self._request + rest.SerializeToString()

    def take(self, response: generation_pb2.GenerateResponse) -> Iterator[Event]:
        """Return the events of a message: what is new, and the end if it is the last."""
        self._progress_at = self._clock()
        self._num_failures = self._num_target_losses = 0
        self.connection.has_answered = True
        if response.HasField("loading"):
            yield loading_from(response.loading)
            return
        self.session_id = response.session_id
        delta = delta_from(response)
        if not self._token_ids:
            self._first_token_at = self._progress_at
            self.seed = response.seed
            self._fingerprint = response.prompt_fingerprint
            self.prompt_token_ids = tuple(response.prompt_token_ids)
            self.source_token_ids = tuple(response.source_token_ids)
        elif response.prompt_fingerprint:  # the beginning of a stream that resumes
            delta = replace(delta, max_tokens=0, prompt_end="", prompt_tokens=())
        self._token_ids.extend(token.id for token in delta.tokens)
        if self._keep is not None:
            self.tokens.extend(delta.tokens)
        self._count(delta)
        if delta.finished is None:
            yield delta
            return
        finished = self._finish(delta.finished)
        yield replace(delta, finished=finished)
        yield finished

    def failed(self, error: SpecdError) -> Retrying:
        """Return how the generation resumes after an error. Raises that error if it cannot, or CallError once the
        client is closed.
        """
        if self.connection.is_closed:
            raise client_closed() from error
        if not self._can_retry(error):
            raise error
        self.connection.has_answered = True
        self._num_failures += 1
        if self._num_failures == 1:
            self._failing_since = self._clock()
        pause = self._policy.pause(self._num_failures, error.retry_after_seconds, self._chance())
        if self._clock() + pause > self._failing_since + self._policy.patience_seconds:
            raise error
        if error.reason == "TARGET_UNAVAILABLE":
            self._num_target_losses += 1
        if self._continues_session and self._restored is not None and not self._is_untouched(error):
            self._request, self._continues_session = self._restored, False
        if self._part.generated_tokens:
            self._earlier = self._earlier.plus(self._part)
            self._part = EarlierParts()
        return Retrying(error, 0.0 if error.reason == "SESSION_NOT_FOUND" else pause)

    def _can_retry(self, error: SpecdError) -> bool:
        if self._policy.only_resumes and not self._token_ids:
            return False
        cannot_restore = self._continues_session and self._restored is None and not self._is_untouched(error)
        if error.reason == "SESSION_NOT_FOUND":
            return self._continues_session and not cannot_restore
        # The session can be there still, in a file or on a server. The fingerprint of its prompt shows whether it is as
        # it was.
        if cannot_restore and not (self._token_ids and self._fingerprint):
            return False
        if error.reason == "TARGET_UNAVAILABLE" and self._num_target_losses >= _MOST_TARGET_LOSSES:
            return False
        # The turn that was lost can hold its session for some seconds.
        is_busy = error.reason == "SESSION_BUSY" and bool(self._token_ids)
        # Only a request that does not wait for its model gets MODEL_LOADING.
        waits = error.retry_after_seconds > 0 and error.reason != "MODEL_LOADING"
        if waits or error.reason == "CLIENT_STALLED" or is_busy:
            return True
        # Without a word of specd's own: the connection broke, the server is stopping or not there, or it, or a proxy,
        # ended at once and cancelled its calls. A server that never was there is not waited for: the address may be
        # wrong.
        return error.reason in {"UNAVAILABLE", "CANCELLED"} and self.connection.has_answered

    def _is_untouched(self, error: SpecdError) -> bool:
        """Whether a session on the server is surely as it was: the call was refused by specd's own word."""
        return not self._part.generated_tokens and error.retry_after_seconds > 0

    def _count(self, delta: Delta) -> None:
        part = self._part
        for position, token in enumerate(delta.tokens, start=part.generated_tokens):
            part.near_ties += token.near_tie
            if token.margin is not None:
                part.smallest_margin = min(part.smallest_margin, (token.margin, position))
        part.generated_tokens += len(delta.tokens)
        part.rounds += 1
        part.proposed_tokens += delta.round.proposed
        part.accepted_tokens += delta.round.accepted
        part.sources = sums_by_source(part.sources, delta.round.sources)

    def _finish(self, finished: Finished) -> Finished:
        assert self._first_token_at is not None
        statistics = self._earlier.followed_by(
            finished.statistics,
            time_to_first_token_seconds=self._first_token_at - self._started_at,
            decode_seconds=self._progress_at - self._first_token_at,
        )
        self.completion = Completion(
            self.text,
            tuple(self.tokens),
            finished.reason,
            statistics,
            self.session_id,
            self.seed,
            finished.stop_string,
            finished.stop_token_id,
            self._schema,
            self._reasoning_end,
        )
        if self._keep is not None:
            self._keep(self, self.completion)
        return Finished(finished.reason, statistics, finished.stop_string, finished.stop_token_id)


def ended_early() -> UnavailableError:
    """Return the error of a stream that ended well, but without a last message, as behind some proxies."""
    return UnavailableError("UNAVAILABLE", "the stream ended before its last message")
