"""Clients' sampling parameters, their checks and their messages to workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from gateway.fields import SamplingFields
from specd.cli.options import RequestOptions
from specd.client.options import GenerationOptions
from specd.client.protocol.wire import to_request
from specd.errors import InvalidRequestError
from specd.grammar import Grammar, GrammarKind, ReasoningTokens, SessionGrammar
from specd.rpc.messages import sampling_from, to_session_sampling
from specd.sampling import (
    MAX_LOGIT_BIASES,
    Acceptance,
    Sampling,
)
from specd.v1 import sampling_pb2

NAN, INF = float("nan"), float("inf")


def check(**fields: Any) -> None:
    acceptance = Acceptance.REJECTION if fields.get("lenience") else Acceptance.COUPLED
    Sampling(**{"acceptance": acceptance, **fields}).check(vocabulary_size=100, model_name="some/model")


# By field, values in its range and outside of it.
RANGES: list[tuple[str, list[Any], list[float]]] = [
    ("temperature", [0, 0.01, 1, 100], [0.0099, 100.01, 1e-45, -0.01, -1, 1e-30, NAN, INF, -INF]),
    ("top_k", [0, 1, 100, 2**32 - 1], []),
    ("top_p", [1e-6, 0.5, 1], [0, 1e-7, 1 + 2**-23, 1.0001, -0.5, NAN, INF, -INF]),
    ("min_p", [0, 1e-6, 1], [-1e-6, 1.0001, NAN, INF, -INF]),
    ("repetition_penalty", [0.01, 1, 10], [0, 1e-38, 0.0099, 10.001, -1, NAN, INF, -INF]),
    ("presence_penalty", [-2, 0, 2], [-2.001, 2.001, NAN, INF, -INF]),
    ("frequency_penalty", [-2, 0, 2], [-2.001, 2.001, NAN, INF, -INF]),
    ("penalty_context_size", [0, 1, 2**31 - 1], [2**31, 2**32 - 1]),
    ("lenience", [0, 1e-6, 1], [-1e-6, 1.0001, NAN, INF, -INF]),
    ("top_log_probabilities", [None, 0, 20], [21, 2**32 - 1]),
    ("vocabulary_size", [0, 1, 2**22], [2**22 + 1, 2**32 - 1]),
    ("seed", [0, 2**64 - 1], []),
]


@pytest.mark.parametrize(("field", "inside", "outside"), RANGES)
def test_each_field_has_its_range(field: str, inside: list[Any], outside: list[float]) -> None:
    for value in inside:
        check(**{field: value})
    for value in outside:
        with pytest.raises(InvalidRequestError) as error:
            check(**{field: value})
        assert error.value.reason == "OUT_OF_RANGE"
        shown = value if isinstance(value, int) else f"{value:.8g}"
        assert str(error.value).startswith(f"{field} is {shown}: it must be ")


@pytest.mark.parametrize("bias", [-100.001, 100.001, NAN, INF, -INF])
def test_a_bias_has_its_range(bias: float) -> None:
    check(logit_bias={0: 100.0, 99: -100.0})
    with pytest.raises(InvalidRequestError, match=f"^logit_bias of token 7 is {bias:g}: ") as error:
        check(logit_bias={3: 1.0, 7: bias})
    assert error.value.reason == "OUT_OF_RANGE"


def test_there_are_not_too_many_biases() -> None:
    many = Sampling(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0))
    many.check(vocabulary_size=5000, model_name="")
    with pytest.raises(InvalidRequestError, match=f"logit_bias has {MAX_LOGIT_BIASES + 1} entries"):
        replace(many, logit_bias={**many.logit_bias, 4000: 1.0}).check(vocabulary_size=5000, model_name="")


def test_token_ids_must_be_in_the_vocabulary() -> None:
    check(logit_bias={99: 1.0}, suppressed_token_ids=(0, 99))
    for given in ({"logit_bias": {3: 1.0, 100: 1.0}}, {"suppressed_token_ids": (100, 5)}):
        with pytest.raises(InvalidRequestError, match=f"{next(iter(given))} has 100.*some/model ends at 99") as error:
            check(**given)
        assert error.value.reason == "TOKEN_OUT_OF_VOCABULARY"


def test_lenience_needs_rejection() -> None:
    with pytest.raises(InvalidRequestError, match=r"lenience is 0\.5, but acceptance is COUPLED") as error:
        check(lenience=0.5, acceptance=Acceptance.COUPLED)
    assert error.value.reason == "CONTRADICTION"


@pytest.mark.parametrize("kind", [np.float32, lambda value: float(np.float32(value))])
def test_limits_hold_for_the_float32_that_a_client_means(kind: Callable[[float], Any]) -> None:
    for value in (0.01, 0.05, 0.7, 100):
        check(temperature=kind(value))
    for value in (0.05, 0.7, 1):
        check(top_p=kind(value), min_p=kind(value), lenience=kind(value), repetition_penalty=kind(value))
    for value in (-2, -0.7, 0.7, 2):
        check(presence_penalty=kind(value), frequency_penalty=kind(value), logit_bias={1: kind(50 * value)})
    for value in (0.01, 10):
        check(repetition_penalty=kind(value))


DOCS = Path(__file__).parents[2] / "docs"
PARAMETERS = [each.name for each in sampling_pb2.SamplingParameters.DESCRIPTOR.fields]
# `specd generate` and `specd chat` do without these.
NOT_IN_CLI = {
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_context_size",
    "logit_bias",
}


def test_every_number_has_a_range() -> None:
    assert set(PARAMETERS) - {"logit_bias", "acceptance"} <= {field for field, _, _ in RANGES}


def test_every_parameter_is_everywhere() -> None:
    assert set(PARAMETERS) <= {each.name for each in fields(Sampling)}
    assert set(PARAMETERS) <= GenerationOptions.__annotations__.keys()
    assert set(PARAMETERS) <= SamplingFields.model_fields.keys()
    assert set(PARAMETERS) - NOT_IN_CLI == set(PARAMETERS) & {each.name for each in fields(RequestOptions)}
    for page in ("api.md", "http.md"):
        text = (DOCS / page).read_text()
        assert [name for name in PARAMETERS if f"`{name}`" not in text] == [], page


def test_a_client_sends_every_parameter() -> None:
    sent: dict[str, Any] = {"temperature": 0.5, "top_k": 6, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.25}
    sent |= {"presence_penalty": -0.5, "frequency_penalty": 0.5, "penalty_context_size": 3, "logit_bias": {1: 0.5}}
    sent |= {"seed": 2**64 - 1, "acceptance": "rejection", "lenience": 0.125}
    assert sorted(sent) == sorted(PARAMETERS)
    parameters = to_request("", cast(GenerationOptions, sent)).sampling
    assert {each.name for each, _ in parameters.ListFields()} == set(PARAMETERS)


def test_a_sampling_survives_the_wire() -> None:
    sampling = Sampling(
        top_k=6,
        penalty_context_size=3,
        logit_bias={1: 0.5, 2: -1.0},
        suppressed_token_ids=(3, 4),
        suppressed_before=9,
        vocabulary_size=16,
        temperature=0.5,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        seed=2**64 - 1,
        acceptance=Acceptance.REJECTION,
        lenience=0.125,
        top_log_probabilities=0,
        prompt_log_probabilities=True,
        grammar=SessionGrammar(Grammar(GrammarKind.REGEX, "a*"), 7, ReasoningTokens(3, 2, is_open=True)),
    )
    assert [
        each.name for each in fields(Sampling) if getattr(sampling, each.name) == getattr(Sampling(), each.name)
    ] == []
    any_object = SessionGrammar(Grammar(GrammarKind.JSON_OBJECT), 0, ReasoningTokens(0))
    others = (replace(sampling, top_log_probabilities=None), replace(sampling, grammar=any_object))
    for sent in (sampling, Sampling(), *others):
        message = sampling_pb2.SessionSampling.FromString(to_session_sampling(sent).SerializeToString())
        assert sampling_from(message) == sent
    message = sampling_pb2.SessionSampling(parameters=sampling_pb2.SamplingParameters(temperature=0.01))
    assert sampling_from(message) == Sampling(temperature=float(np.float32(0.01)))
    sampling_from(message).check(vocabulary_size=16, model_name="")
