"""The model of a session: what a request can name, and what stays the same for all turns of a session."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import SessionSetup
from coordinator.proposals.drafter import Drafter, DraftStream
from coordinator.proposals.drafts import Drafts
from coordinator.replicas.prefix_estimate import blocks_of
from coordinator.sessions.prompt import EncodedPrompt
from coordinator.sessions.resumption import prompt_fingerprint
from coordinator.sessions.saved_session import pack, unpack
from coordinator.sessions.session_model import find_model, model_for, models_of
from coordinator.sessions.session_store import KeptSession
from coordinator.workers.workers import Workers
from specd.adapter_settings import split_adapters
from specd.client.resuming.history import SessionHistory
from specd.errors import InvalidRequestError, NotFoundError
from specd.model_info import AdapterInfo, ModelInfo
from specd.rpc.messages import model_from, to_model
from specd.sampling import Sampling
from tests.unit.fake_workers import MODEL, FakeDraft, FakeDraftStream, next_token, plan_of

SQL, CHAT = AdapterInfo("sql", "d1"), AdapterInfo("org/chat", "d2")
TARGET = replace(MODEL, name="/models/base", fingerprint="f", whole_fingerprint="w", adapters=(SQL, CHAT))


def kept(adapter: AdapterInfo | None, num_turns: int = 1) -> KeptSession:
    return KeptSession("s", "", 0.0, 0.0, 0.0, adapter=adapter, num_turns=num_turns, busy=False)


def test_the_models_are_the_target_and_its_adapters() -> None:
    models = models_of(TARGET)
    assert [model.public_name for model in models] == ["base", "sql", "org/chat"]
    assert [model.parent for model in models] == ["", "base", "base"]
    assert len({model.fingerprint for model in models}) == len({model.whole_fingerprint for model in models}) == 3
    assert [find_model(TARGET, name) for name in ("", "base", "sql", "org/chat")] == [TARGET, *models]
    assert [model_from(to_model(model)) for model in models] == models
    # The digest of a whole model is not known at first.
    assert replace(TARGET, whole_fingerprint="").with_adapter(SQL).whole_fingerprint == ""


@pytest.mark.parametrize("name", ["/models/base", "chat", "SQL", "x" * 10_000])
def test_another_name_is_not_found(name: str) -> None:
    with pytest.raises(NotFoundError, match="those that are served are 'base', 'sql', 'org/chat'") as raised:
        find_model(TARGET, name)
    assert raised.value.reason == "MODEL_NOT_FOUND"
    assert len(str(raised.value)) < 400
    with pytest.raises(NotFoundError, match="the one that is served is 'base'"):
        find_model(replace(TARGET, adapters=()), name)


@pytest.mark.parametrize("adapter", [None, SQL])
def test_a_session_keeps_the_model_of_its_first_turn(adapter: AdapterInfo | None) -> None:
    own = TARGET if adapter is None else TARGET.with_adapter(adapter)
    for name in ("", own.public_name):
        assert model_for(TARGET, name, kept(adapter)) == own
    for other in {"base", "sql", "org/chat"} - {own.public_name}:
        with pytest.raises(InvalidRequestError, match=f"began with the model '{own.public_name}'.*names '{other}'"):
            model_for(TARGET, other, kept(adapter))
        assert model_for(TARGET, other, kept(None, num_turns=0)).public_name == other  # its first turn


@pytest.mark.parametrize("adapters", [(), (CHAT,), (AdapterInfo("sql", "with other weights"), CHAT)])
def test_a_session_ends_with_its_adapter(adapters: tuple[AdapterInfo, ...]) -> None:
    with pytest.raises(NotFoundError, match="'sql', which is not served any more, or has other weights"):
        model_for(replace(TARGET, adapters=adapters), "", kept(SQL))


@pytest.mark.parametrize("adapter", [None, SQL])
def test_a_saved_session_has_its_adapter(adapter: AdapterInfo | None) -> None:
    saved = pack(kept(adapter))
    assert unpack("s", "", saved).adapter == adapter
    without = saved.replace(b'"adapter"', b'"of another version"')  # sessions of earlier versions have none
    assert unpack("s", "", without).adapter is None


def test_digests_differ_by_adapter() -> None:
    prompt = EncodedPrompt([1, 2, 3])
    assert len({prompt_fingerprint(model, prompt) for model in models_of(TARGET)}) == 3
    tokens = range(200)
    blocks = {blocks_of(tokens, namespace=b"", adapter=name) for name in ("", "sql", "org/chat")}
    assert len({digests[0] for digests in blocks}) == 3


def test_a_target_with_other_adapters_is_another_one() -> None:
    assert TARGET.decodes_like(replace(TARGET, adapters=(CHAT, SQL)))
    for adapters in ((), (SQL,), (SQL, AdapterInfo("org/chat", "d3")), (SQL, AdapterInfo("chat", "d2"))):
        assert not TARGET.decodes_like(replace(TARGET, adapters=adapters))


class NotingDraft(FakeDraft):
    """A draft that notes the adapters for which streams were opened."""

    def __init__(self, model: ModelInfo) -> None:
        super().__init__(next_token, [], model=model)
        self.opened: list[str] = []

    def open_stream(self, setup: SessionSetup) -> FakeDraftStream:
        self.opened.append(setup.adapter)
        return super().open_stream(setup)


@pytest.mark.parametrize(("adapters", "opened"), [((), ""), ((CHAT,), ""), ((AdapterInfo("sql", "its own"),), "sql")])
async def test_a_draft_proposes_with_its_adapter_of_the_same_name(
    adapters: tuple[AdapterInfo, ...], opened: str
) -> None:
    draft = NotingDraft(replace(MODEL, adapters=adapters))
    setup = SessionSetup("s", Sampling(), namespace=b"", adapter="sql")
    drafts = Drafts[DraftStream](Workers([draft]))
    drafter = Drafter(lambda: drafts, setup, timeout_seconds=1.0, clock=lambda: 0.0)
    part = await drafter.propose([1, 2, 3], (), plan_of(2))
    assert part is not None
    assert len(part.token_ids) == 2
    assert draft.opened == [opened]
    drafter.close()


def test_a_client_restores_a_session_with_its_model() -> None:
    """A later turn need not name it, but the coordinator has lost the session and knows it no longer."""
    history = SessionHistory()
    assert history.turn("a", {"model": "sql"}).request.model == "sql"
    history.session_id, history.token_ids = "s", (1, 2)  # the turn has finished
    turn = history.turn("b", {})
    assert turn.restored is not None
    assert (turn.request.model, turn.restored.model) == ("sql", "sql")
    assert list(turn.restored.resumption.session_token_ids) == [1, 2]
    # The coordinator knows the model of a session that began elsewhere.
    assert SessionHistory("s").turn("b", {}).request.model == ""


def test_a_setting_has_names_and_directories() -> None:
    assert split_adapters("") == {}
    assert split_adapters(" a=/x , org/b.c-d=~/y=z,") == {"a": "/x", "org/b.c-d": "~/y=z"}


@pytest.mark.parametrize("text", ["a", "=b", "a=", "a=1,a=2", "a/b/c=1", "-a=1", "ä=1", "a b=1", f"{'a' * 129}=1"])
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="adapter"):
        split_adapters(text)
    with pytest.raises(ValueError, match="65 adapters are given"):
        split_adapters(",".join(f"a{i}=x" for i in range(65)))
