"""The gateway remembers several models, and a stream that waits for one has comments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import pytest

from gateway.http.endpoint import Requester
from gateway.http.errors import ApiError
from gateway.http.event_stream import data, send_events
from gateway.http.notice import Notice
from gateway.model_choice import ModelChoice
from gateway.model_list import describe, status_of
from gateway.served_models import ServedModels
from specd.client import AsyncClient, Loading, ModelStatus, ServiceDescription
from specd.errors import NotFoundError, UnavailableError
from specd.model_info import AdapterInfo, ModelInfo

CALLER = Requester("token")
CODER = ModelInfo(
    name="coder",
    architecture="llama",
    fingerprint="f",
    vocabulary_fingerprint="v",
    vocabulary_size=100,
    context_length=64,
    eos_token_ids=(0,),
    precision="float32",
    device="cpu",
    adapters=(AdapterInfo("tuned", "a"),),
)
SMALL = ModelInfo("small", "", "", "", 0, 0, (), "", "")


class FakeCoordinator:
    """A coordinator of `coder`, which is loaded, and of `small`, which never was."""

    def __init__(self) -> None:
        self.now = 0.0
        self.infos = {"coder": CODER, "small": SMALL}
        self.states = {"coder": "ready", "small": "unloaded"}
        self.template = "{{ messages }}"
        self.described: list[str] = []
        self.loading: Loading | None = None
        self.loaded = asyncio.Event()

    async def statuses(self, **_: Any) -> tuple[ModelStatus, ...]:
        return tuple(ModelStatus(name, state, self.loading, 7, False, 0) for name, state in self.states.items())

    async def models(self, **_: Any) -> tuple[ModelInfo, ...]:
        return tuple(info for each in self.infos.values() for info in (each, *map(each.with_adapter, each.adapters)))

    async def describe(self, model: str = "", *, refuse_unloaded: bool = False, **_: Any) -> ServiceDescription:
        self.described.append(model)
        name = {"": "coder", "tuned": "coder"}.get(model, model)
        if name not in self.infos:
            raise NotFoundError("MODEL_NOT_FOUND", f"model is {name!r}")
        if self.states[name] != "ready":
            self.states[name] = "loading"
            if refuse_unloaded:
                raise UnavailableError("MODEL_LOADING", f"the model {name!r} is not loaded", retry_after_seconds=5)
            await self.loaded.wait()
            self.states[name], self.infos[name] = "ready", replace(CODER, name=name, adapters=())
        return ServiceDescription(
            target=self.infos[name],
            draft=None,
            draft_fault="",
            default_num_draft_tokens=None,
            max_num_draft_tokens=32,
            sources=(),
            chat_template=self.template,
        )


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def models(coordinator: FakeCoordinator) -> ServedModels:
    return ServedModels(cast(AsyncClient, coordinator), clock=lambda: coordinator.now)


async def named(models: ServedModels, name: str = "") -> str:
    found = await models.at_once(ModelChoice(name), CALLER)
    assert found is not None
    return found.model.model_id


async def test_a_description_is_kept_for_some_seconds(models: ServedModels, coordinator: FakeCoordinator) -> None:
    assert [await named(models, name) for name in ("", "coder", "tuned", "")] == ["coder", "coder", "tuned", "coder"]
    assert coordinator.described == [""]
    coordinator.now, coordinator.template = 6.0, "another"
    swapped = await models.at_once(ModelChoice("coder"), CALLER)
    assert swapped is not None
    assert swapped.model.chat_template == "another"  # not the next request only
    assert coordinator.described == ["", "coder"]


async def test_the_model_of_a_session_is_asked_for(models: ServedModels, coordinator: FakeCoordinator) -> None:
    await named(models)
    for _ in range(2):
        await models.at_once(ModelChoice("", "session"), CALLER)
    assert len(coordinator.described) == 3


async def test_what_cannot_be_answered_at_once(models: ServedModels, coordinator: FakeCoordinator) -> None:
    assert await models.at_once(ModelChoice("small"), CALLER) is None
    for choice, caller in (
        (ModelChoice("small", refuses_unloaded=True), CALLER),
        (ModelChoice("small"), Requester(refuses_unloaded=True)),
    ):
        with pytest.raises(ApiError) as raised:
            await models.at_once(choice, caller)
        assert (raised.value.status, raised.value.code) == (503, "model_loading")
        assert raised.value.headers["retry-after"] == "5"
    with pytest.raises(ApiError, match="those that are served are 'coder', 'tuned', 'small'") as raised:
        await models.at_once(ModelChoice("other"), CALLER)
    assert (raised.value.status, raised.value.param) == (404, "model")


async def test_a_wait_says_how_far_it_is(models: ServedModels, coordinator: FakeCoordinator) -> None:
    notice = Notice()
    waiting = asyncio.ensure_future(models.loaded(ModelChoice("small"), CALLER, notice))
    await asyncio.sleep(0)
    assert notice.text == "loading small"
    coordinator.loading = Loading("target-worker small", "downloading", 2, 5)
    while notice.text == "loading small":
        await notice.changed()
    assert notice.text == "loading small, target-worker small: downloading 40 %"
    coordinator.loaded.set()
    assert (await waiting).model.model_id == "small"


async def test_the_list_asks_loaded_models_alone_and_once(models: ServedModels, coordinator: FakeCoordinator) -> None:
    for _ in range(2):
        coordinator.now += 60
        listed = [describe(each) for each in await models.list(CALLER)]
    assert coordinator.described == ["coder"]
    assert coordinator.states["small"] == "unloaded"
    assert [(each["id"], each["parent"], each["status"]["value"]) for each in listed] == [
        ("coder", None, "loaded"),
        ("tuned", "coder", "loaded"),
        ("small", None, "unloaded"),
    ]
    assert listed[0]["specd"]["chat"] is True
    assert listed[2]["specd"] == {"memory_bytes": 7, "pinned": False, "active_requests": 0}
    coordinator.infos["coder"] = replace(CODER, fingerprint="of another model")
    await models.list(CALLER)
    assert coordinator.described == ["coder", "coder"]


@pytest.mark.parametrize(
    ("state", "loading", "shown"),
    [
        ("ready", None, {"value": "loaded"}),
        ("waiting", None, {"value": "loading"}),
        ("leaving", None, {"value": "unloaded"}),
        ("loading", Loading(), {"value": "loading"}),
        ("loading", Loading("w", "warming up"), {"value": "loading", "stage": "w: warming up"}),
        (
            "loading",
            Loading("w", "downloading", 1, 4),
            {"value": "downloading", "stage": "w: downloading 25 %", "progress": {"w": {"done": 1, "total": 4}}},
        ),
    ],
)
def test_states_have_the_words_of_llama_cpp(state: str, loading: Loading | None, shown: dict[str, Any]) -> None:
    assert status_of(ModelStatus("m", state, loading, 0, False, 0)) == shown


# -- Streams


async def sent_by(
    act: Callable[[Notice], Awaitable[None]], *, error: ApiError | None = None, notice_seconds: float = 0.01
) -> list[bytes]:
    """Return what a stream sends: after `act` comes its one event, or its error."""
    notice, sent = Notice(), []

    async def events() -> AsyncIterator[bytes]:
        await act(notice)
        if error is not None:
            raise error
        yield b"event"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"begin"))

    await send_events(
        events(),
        send,
        dict,
        lambda failure: data(failure.body),
        notice,
        ping_seconds=60.0,
        notice_seconds=notice_seconds,
    )
    return sent


async def test_a_notice_is_sent_at_once_and_again() -> None:
    async def act(notice: Notice) -> None:
        notice.say("loading x")
        await asyncio.sleep(0.1)
        notice.say("loading x, 40 %")
        await asyncio.sleep(0.1)

    begin, *comments, event, end = await sent_by(act)
    assert (begin, event, end) == (b"begin", b"event", b"")
    # How often each comes depends on the machine's pace.
    assert [comment for comment, _ in groupby(comments)] == [b": loading x\n\n", b": loading x, 40 %\n\n"]
    assert len(comments) > 2
    # A notice that is not repeated for a minute is still sent as soon as it changes.
    assert await sent_by(act, notice_seconds=60.0) == [begin, b": loading x\n\n", b": loading x, 40 %\n\n", event, end]


async def test_there_is_no_comment_without_a_notice() -> None:
    async def act(notice: Notice) -> None:
        await asyncio.sleep(0.05)
        notice.say("")
        await asyncio.sleep(0.05)

    assert await sent_by(act) == [b"begin", b"event", b""]


async def test_an_error_behind_a_notice_is_an_event() -> None:
    async def act(notice: Notice) -> None:
        notice.say("loading x")
        await asyncio.sleep(0.02)

    sent = await sent_by(act, error=ApiError(503, "model_not_loaded", "no"))
    assert b'"code":"model_not_loaded"' in sent[-2]

    async def silent(_: Notice) -> None:
        pass

    with pytest.raises(ApiError):
        await sent_by(silent, error=ApiError(503, "model_loading", "no"))
