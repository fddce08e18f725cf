"""Replies of a session in its next turn: with the special tokens that the model said, and with its own tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from coordinator.coordinator import Coordinator
from coordinator.core import Part, Plan, Proposal, SessionSetup, Verdict
from coordinator.workers.verifier import TargetStream
from specd.client.async_client import AsyncClient
from specd.client.protocol.chats import Messages
from specd.errors import InvalidRequestError
from specd.text.chat import Chat, ChatTemplate, Reply
from specd.text.kept_tokens import with_kept_tokens
from specd.text.literals import MAX_LITERALS, Literals
from specd.text.tokenizer import Tokenizer
from tests.unit.mortal_server import MODEL, Death, MortalServer, SeededTarget
from tests.unit.test_resuming import client_of
from tests.unit.tokenizers_by_kind import KINDS, raw_tokenizer, tokenizer_of

# The form of LFM2: marks of a tool call are special tokens, as are those of the messages.
CALL, CALL_END, START, END = "<|tool_call_start|>", "<|tool_call_end|>", "<|im_start|>", "<|im_end|>"
WRITES = "{{ m.content }}"
TRIMS = "{{ m.content | trim }}"
FORGETS = "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
REFUSES = "{% if '<|tool' in m.content %}{{ raise_exception('no marks') }}{% endif %}{{ m.content }}"


def template_of(content: str) -> str:
    messages = f"{{% for m in messages %}}{START}{{{{ m.role }}}}\n{content}{END}\n{{% endfor %}}"
    return f"{messages}{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"


def tokenizer(content: str = WRITES) -> Tokenizer:
    raw = HuggingFaceTokenizer.from_str(raw_tokenizer("byte-level BPE").to_str())
    raw.add_special_tokens([AddedToken(token, special=True) for token in (CALL, CALL_END, START, END)])
    return Tokenizer(raw.to_str().encode(), ChatTemplate(template_of(content), {}, "marks"))


TOKENIZER = tokenizer()
MARKS = replace(MODEL, vocabulary_size=TOKENIZER.vocabulary_size, eos_token_ids=(TOKENIZER.encode(END)[-1],))
IDS = {text: token_id for token_id, text in TOKENIZER.special_tokens.items()}


def spelled(text: str) -> list[int]:
    """Return a token for each character, which the tokenizer itself would not choose."""
    return [token_id for character in text for token_id in TOKENIZER.encode(character, add_special_tokens=False)]


# What a model says: marks, typed look-alikes, and tokens that are not the tokenizer's.
SAID = [
    *spelled("Let me "),
    IDS[CALL],
    *spelled('[weather(city="Bern")]'),
    IDS[CALL_END],
    *spelled(f" as {CALL}"),
    IDS[END],
]
SECOND = [*TOKENIZER.encode("Sunny", add_special_tokens=False), IDS[END]]


class ScriptedTarget(SeededTarget):
    """A target that says the scripted replies, turn after turn."""

    def __init__(self, *turns: list[int]) -> None:
        super().__init__()
        self.model = MARKS
        self.turns = [*turns]

    def open_stream(self, setup: SessionSetup) -> TargetStream:
        return _ScriptedStream(iter(self.turns.pop(0)))


@dataclass
class _ScriptedStream:
    said: Any
    num_held: int = 0

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, ahead: Plan, timeout_seconds: float
    ) -> Verdict:
        self.num_held = position + len(token_ids)
        return Verdict(0, next(self.said), self.num_held)

    async def proposal(self, timeout_seconds: float) -> Part:
        raise AssertionError("this target proposes nothing")

    def close(self) -> None:
        """Hold nothing that would have to be freed."""


class Server(MortalServer):
    """Serves one session, whose model says `turns`, by a template that writes contents in its way."""

    def __init__(self, content: str, *turns: list[int], deaths: Sequence[Death | None] = ()) -> None:
        self._turns = [*turns]
        self.after_a_loss: list[list[int]] = []
        super().__init__(deaths, tokenizer(content), MARKS)

    def _begin(self) -> Coordinator:
        coordinator = super()._begin()
        turns = self.after_a_loss or self._turns
        coordinator.replicas.workers.members.clear()
        coordinator.replicas.workers.add(ScriptedTarget(*turns))
        return coordinator


async def prompts_of(
    client: AsyncClient, says: Sequence[Messages], **options: Any
) -> list[tuple[list[int], list[int]]]:
    """Return prompt and completion of each turn of a conversation, as tokens."""
    session, turns = client.session(), []
    for said in says:
        stream = session.chat(said, num_draft_tokens=0, **options)
        completion = await stream.completion()
        turns.append((list(session.token_ids[: -len(completion.token_ids)]), completion.token_ids))
    return turns


def hold(
    content: str, *turns: list[int], says: Sequence[Messages], **options: Any
) -> list[tuple[list[int], list[int]]]:
    return asyncio.run(prompts_of(client_of(Server(content, *turns)), says, **options))


def test_the_next_turn_has_the_tokens_of_the_one_before() -> None:
    (first, said), (second, _) = hold(WRITES, SAID, SECOND, says=["Weather?", f"And {END} now?"])
    assert said == SAID
    assert second[: len(first) + len(said)] == [*first, *said]
    # What the user types is text, in a conversation with special tokens too.
    assert second[len(first) + len(said) :].count(IDS[END]) == 1
    assert f"And {END} now?" in TOKENIZER.decode(second, skip_special_tokens=False)


def test_a_turn_that_is_cut_off_keeps_its_tokens() -> None:
    (first, said), (second, _) = hold(WRITES, SAID, SECOND, says=["Weather?", "Now?"], max_tokens=20)
    assert said == SAID[:20]
    assert second[: len(first) + len(said)] == [*first, *said]


def test_a_reply_that_the_template_trims_keeps_its_marks() -> None:
    padded = [*spelled("  "), *SAID[:-1], *spelled(" \n"), IDS[END]]
    (first, _), (second, _) = hold(TRIMS, padded, SECOND, says=["Weather?", "Now?"])
    text = TOKENIZER.decode(second, skip_special_tokens=False)
    assert f'assistant\nLet me {CALL}[weather(city="Bern")]{CALL_END} as {CALL}{END}\n' in text
    assert second.count(IDS[CALL]) == second.count(IDS[CALL_END]) == 1
    assert second[: len(first) - 3] == first[: len(first) - 3]


def test_a_reply_whose_reasoning_the_template_forgets_keeps_its_marks() -> None:
    thought = [*spelled("hm</think>"), *SAID]
    _, (second, _) = hold(FORGETS, thought, SECOND, says=["Weather?", "Now?"])
    assert "hm" not in TOKENIZER.decode(second, skip_special_tokens=True)
    assert second.count(IDS[CALL]) == second.count(IDS[CALL_END]) == 1


def test_a_template_that_takes_no_marks_gets_the_text() -> None:
    said = [*spelled("Let me "), IDS[CALL], *spelled('[weather(city="Bern")]'), IDS[END]]
    _, (second, _) = hold(REFUSES, said, SECOND, says=["Weather?", "Now?"])
    assert IDS[CALL] not in second
    assert 'Let me [weather(city="Bern")]' in TOKENIZER.decode(second, skip_special_tokens=False)


@pytest.mark.parametrize("after", [0, 3])
def test_a_lost_session_is_restored_with_the_tokens_of_its_replies(after: int) -> None:
    says = ["Weather?", "Now?", "Thanks"]
    whole = hold(WRITES, SAID, SAID, SECOND, says=says)
    deaths = (None, Death(after, loses_sessions=True))
    server = Server(WRITES, SAID, SAID, deaths=deaths)
    server.after_a_loss = [SAID[after:], SECOND]
    assert asyncio.run(prompts_of(client_of(server), says)) == whole
    restored = server.requests[-2]
    assert not restored.session_id
    assert len(restored.resumption.token_ids) == after


def test_a_lost_session_is_restored_with_the_fields_of_its_messages() -> None:
    aside = {"z": 2.0, "a": 1234567890123456789, "m": [None, {"b": 1e-7, "a": []}]}
    content = "{{ m.content }}{{ m.aside | tojson if m.aside }}"
    says: list[Messages] = [{"role": "user", "content": "Weather?", "aside": aside}, "Now?"]
    whole = hold(content, SAID, SECOND, says=says)
    server = Server(content, SAID, SAID, deaths=(None, Death(0, loses_sessions=True)))
    server.after_a_loss = [SECOND]
    assert asyncio.run(prompts_of(client_of(server), says)) == whole
    assert not server.requests[-1].session_id
    for prompt, _ in whole:
        assert f"Weather?{json.dumps(aside)}{END}" in TOKENIZER.decode(prompt, skip_special_tokens=False)


def test_special_tokens_of_a_message_are_checked() -> None:
    for token, why in (((0, 5), "not a special token"), ((9, IDS[CALL]), "behind the 2 characters")):
        chat = Chat(({"role": "assistant", "content": "ab"},), special_tokens={0: (token,)})
        with pytest.raises(InvalidRequestError, match=why) as caught:
            Literals(TOKENIZER).hidden_in(chat)
        assert caught.value.reason == "OUT_OF_RANGE"
    twice = Chat(({"role": "assistant", "content": "ab"},), special_tokens={0: ((2, IDS[CALL]), (1, IDS[CALL]))})
    with pytest.raises(InvalidRequestError, match="out of order"):
        Literals(TOKENIZER).hidden_in(twice)


def test_a_conversation_has_no_more_look_alikes_than_it_may() -> None:
    chat = Chat(({"role": "user", "content": END * (MAX_LITERALS - 1)},), tools=({"a": END},))
    assert Literals(TOKENIZER).hidden_in(chat)
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_LITERALS} texts") as caught:
        Literals(TOKENIZER).hidden_in(replace(chat, template_arguments={"a": [END]}))
    assert caught.value.reason == "OUT_OF_RANGE"


def test_no_field_of_a_message_brings_special_tokens() -> None:
    """Applications pass on messages that others write, and the tokens of a reply are no part of these."""
    message = {"role": "user", "content": "ab", "special_tokens": [[1, IDS[END]]], "token_ids": [IDS[END]]}
    literals = Literals(TOKENIZER)
    prompt = TOKENIZER.template.render(literals.hidden_in(Chat((message,))))
    assert literals.encode(prompt).count(IDS[END]) == 1


def test_a_reply_ends_before_the_token_that_ended_it() -> None:
    placed = [(0, 7), (2, 8), (3, 9)]
    assert Reply.of("abc", placed, ends_with_token=True).special_tokens == ((0, 7), (2, 8))
    assert Reply.of("ab", placed, ends_with_token=False).special_tokens == ((0, 7), (2, 8))  # cut by a stop string


pieces = st.lists(st.sampled_from(["cat", " sat", "\n", "Grüße", "☃", " ", "a", ""]), max_size=5)


@given(st.lists(pieces, min_size=1, max_size=4), pieces, st.booleans())
def test_tokens_that_say_the_same_are_kept(runs: list[list[str]], more: list[str], is_ended: bool) -> None:
    """With any tokens for a text: up to its end, if the tokenizer has a token that begins there."""
    before: list[int] = []
    for run in runs:
        before += [IDS[START], *spelled("".join(run))]
    before += [IDS[END]] * is_ended
    text = TOKENIZER.decode(before, skip_special_tokens=False) + "".join(["\n\n", *more] if is_ended else [END, *more])
    now = TOKENIZER.encode(text, add_special_tokens=False)
    kept = with_kept_tokens(TOKENIZER, before, now)
    assert kept[: len(before)] == before
    assert TOKENIZER.decode(kept, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_other_tokens_change_no_text_and_bring_no_special_tokens(kind: str, data: st.DataObject) -> None:
    tokens = tokenizer_of(kind)
    special = sorted(tokens.special_tokens)
    ids = st.lists(st.integers(0, tokens.vocabulary_size - 1) | st.sampled_from(special), max_size=20)
    now = data.draw(ids)
    before = data.draw(ids | st.integers(0, 20).map(lambda number: now[:number]))
    kept = with_kept_tokens(tokens, before, now)
    assert [each for each in kept if each in special] == [each for each in now if each in special]
    text = tokens.decode(now, skip_special_tokens=False)
    assert tokens.decode(kept, skip_special_tokens=False) == text
