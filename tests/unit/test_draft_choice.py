"""`--draft auto`: which models are candidates, which one is chosen, and what is remembered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specd.cli.models.places import places_in
from specd.cli.models.summary import summary_of
from specd.cli.pairs import chooser as chooser_module
from specd.cli.pairs import memory
from specd.cli.pairs.candidates import Candidate, Candidates, candidates_for
from specd.cli.pairs.choice import choose
from specd.cli.pairs.chooser import DraftChooser
from specd.cli.pairs.memory import ModelMemory, PairMemory
from specd.cli.pairs.record import PairRecord, record_path
from specd.cli.pairs.siblings import siblings_of
from specd.model_info import ModelInfo, short_name_of
from specd.pair_worth import DraftTrial, rounds_along
from specd.settings import EMBEDDED_TARGET, load_settings
from specd.startup_error import StartupError
from specd.up_settings import UpSettings
from specd.vocabulary import LOOKUP_ALONE, OWN_HEAD
from tests.unit.made_up_models import LLAMA, model_files, tokenizer, weights, write_directory, write_repository

OTHER_WORDS = {"a": 0, "b": 2, "c": 1}
TARGET = {"seconds": {"1": 0.01, "9": 0.012}, "device": "cpu", "texts": [], "model": {}}
THREADS = {"target": 2, "draft": 1}


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's own models and records out of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    monkeypatch.setattr(chooser_module, "hub_cache", lambda: tmp_path / "hub")
    monkeypatch.setattr("specd.cli.models.places.hub_cache", lambda: tmp_path / "hub")
    monkeypatch.setattr("specd.cli.pairs.listing.hub_cache", lambda: tmp_path / "hub")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    directory = tmp_path / "models"
    for name, size in (("target", 1000), ("draft", 100), ("small", 10)):
        write_directory(directory / name, model_files(model__safetensors=weights(size=size)))
    return directory


def found(models: Path, **options: Any) -> Candidates:
    places = list(places_in(models))
    target = summary_of(next(each for each in places if each.name == "target"))
    return candidates_for(target, places, **options)


def reason(candidates: Candidates, name: str) -> str:
    (reason,) = (each.reason for each in candidates.unfit if each.name == name)
    return reason


def trial(part: float, step_seconds: float) -> DraftTrial:
    agreements = [i % 100 < 100 * part for i in range(400)]
    return DraftTrial({k: rounds_along(agreements, k) for k in range(1, 9)}, {1: step_seconds, 8: 8 * step_seconds})


def test_smaller_models_with_the_same_tokens_are_candidates(models: Path) -> None:
    large = {"half": 501, "foreign": 10, "added": 10, "broken": 10, "encoder": 10}
    files: dict[str, dict[str, Any]] = {
        "foreign": {"tokenizer__json": tokenizer(OTHER_WORDS)},
        "added": {"tokenizer__json": {**tokenizer(), "added_tokens": [{"content": "<x>", "id": 3}]}},
        "broken": {"config__json": "{"},
        "encoder": {"config__json": {**LLAMA, "model_type": "t5"}},
    }
    for name, size in large.items():
        content = {"model__safetensors": weights(size=size), **files.get(name, {})}
        write_directory(models / name, model_files(**content))
    candidates = found(models)
    assert [each.name for each in candidates.fitting] == ["small", "draft"]
    assert "half of the target's" in reason(candidates, "half")
    assert "different tokenizers (token 'b' is id 1 in target and id 2 in foreign)" in reason(candidates, "foreign")
    assert "added token '<x>'" in reason(candidates, "added")
    assert "cannot serve it" in reason(candidates, "broken")
    assert "has an encoder" in reason(candidates, "encoder")


def test_a_head_in_the_targets_files_comes_first(models: Path) -> None:
    (models / "target" / "mtp.safetensors").write_bytes(weights("mtp.fc.weight"))
    first, *others = found(models).fitting
    assert first.is_own_head
    assert [each.name for each in others] == ["small", "draft"]


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        ({"dflash_config": {}, "hidden_size": 64}, True),
        ({"model_type": "llama_mtp", "hidden_size": 32}, False),
        ({"model_type": "llama_mtp"}, True),  # its trial will show
        ({"model_type": "qwen3_5_mtp", "text_config": {"hidden_size": 32}}, False),
        ({"model_type": "gemma4_assistant", "backbone_hidden_size": 64, "text_config": {"hidden_size": 32}}, True),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": 64}}, True),
        ({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 32, "target_hidden_size": 64}, True),
    ],
)
def test_a_head_of_its_own_is_a_candidate_if_it_reads_states_of_the_targets_size(
    models: Path, config: dict[str, Any], fits: bool
) -> None:
    files = model_files(
        config, tokenizer__json=None, model__safetensors=None, mtp__safetensors=weights("mtp.fc.weight")
    )
    write_directory(models / "head", files)
    (models / "target" / "mtp.safetensors").write_bytes(weights("mtp.fc.weight"))
    candidates = found(models)
    own, *others = candidates.fitting
    assert own.is_own_head
    assert [each.name for each in others] == [*["head"] * fits, "small", "draft"]
    assert [each.is_head for each in others] == [*[True] * fits, False, False]
    if not fits:
        assert reason(candidates, "head") == "it is a head for states of size 32, and the target's have size 64"
    assert "does not draft beside adapters" in reason(found(models, heads=False), "head")
    # Other weights are another head.
    before = {each.key for each in others}
    write_directory(models / "head", {"mtp.safetensors": weights("mtp.fc.weight", size=11)})
    assert ({each.key for each in found(models).fitting[1:]} != before) == fits


def test_a_draft_for_which_there_is_no_memory_is_none(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, small = (3 * 4 * size for size in (1000, 100, 10))  # three tensors of float32
    monkeypatch.setattr(memory, "model_memory", lambda: target + draft - 1)
    candidates = found(models)
    assert [each.name for each in candidates.fitting] == ["small"]
    assert "does not fit beside the target" in reason(candidates, "draft")
    monkeypatch.setattr(memory, "model_memory", lambda: 2 * target + small)
    assert [each.name for each in found(models, targets=2).fitting] == ["small"]


CANDIDATES = [Candidate("s", "small", "/small", 1), Candidate("d", "draft", "/draft", 2)]


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ({"s": trial(0.9, 0.001), "d": trial(1.0, 0.012)}, "/small"),
        ({"s": trial(0.5, 0.001), "d": trial(0.95, 0.001)}, "/draft"),
        ({"s": trial(0.9, 0.001), "d": trial(0.9, 0.001)}, "/small"),
        ({"s": trial(0.0, 0.001), "d": trial(0.9, 0.02)}, LOOKUP_ALONE),
        ({"s": DraftTrial(failure="broken"), "d": trial(0.9, 0.001)}, "/draft"),
        ({"s": DraftTrial(failure="broken"), "d": DraftTrial()}, LOOKUP_ALONE),
    ],
    ids=[
        "the faster",
        "the better",
        "the smaller",
        "none that gains",
        "one is broken",
        "no result",
    ],
)
def test_the_draft_with_most_tokens_per_second_is_chosen(trials: dict[str, DraftTrial], chosen: str) -> None:
    choice = choose(CANDIDATES, PairRecord(target=TARGET, drafts=trials))
    assert choice.setting == chosen
    assert len(choice.ranked) == 2


def test_a_head_is_chosen_by_its_worth_and_alone_without_a_trial() -> None:
    head = Candidate(OWN_HEAD, "head of target", is_head=True)
    assert choose([head], PairRecord()).setting == OWN_HEAD
    drafts = {OWN_HEAD: trial(0.6, 0.0001), "s": trial(0.9, 0.0001)}
    assert choose([head, CANDIDATES[0]], PairRecord(target=TARGET, drafts=drafts)).setting == "/small"
    assert choose([head], PairRecord(target=TARGET, drafts={OWN_HEAD: trial(0.0, 0.001)})).setting == LOOKUP_ALONE
    apart = Candidate("h", "head", "/head", 1, is_head=True)
    choice = choose([apart, CANDIDATES[0]], PairRecord(target=TARGET, drafts={"h": trial(0.9, 0.0001)}))
    assert (choice.setting, choice.is_in_target) == ("/head", True)
    # Whether a head of its own was trained for this target, only a trial can tell.
    assert choose([apart], PairRecord(target=TARGET)).chosen is None


class Trials:
    """Plays the trial process, and notes which candidates it was asked to measure."""

    def __init__(self) -> None:
        self.measured: list[list[str]] = []

    def tried(
        self, record: PairRecord, target: str, candidates: Sequence[Candidate], threads: Mapping[str, int], _: Any
    ) -> PairRecord:
        self.measured.append([each.name for each in candidates])
        speeds = {"draft": 0.001, "small": 0.004}
        own = {each.key: trial(0.9, speeds.get(each.name, 0.0005)) for each in candidates}
        return replace(record, target=TARGET, drafts={**record.drafts, **own})


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    played = Trials()
    monkeypatch.setattr(chooser_module, "tried", played.tried)
    monkeypatch.setattr("specd.cli.pairs.listing.included_directories", list)
    monkeypatch.setattr("specd.cli.models.places.included_directories", list)
    return played


def chosen(models: Path, **options: Any) -> str:
    """Return the choice of a start, and check that the next one remembers it."""
    chooser = DraftChooser(str(models / "target"), [models])
    choice = chooser.recall() or chooser.choose(chooser.find().fitting, **options)
    remembered = DraftChooser(str(models / "target"), [models]).recall()
    assert remembered is not None
    assert remembered.setting == choice.setting
    return choice.setting


def test_a_choice_is_remembered_until_the_models_change(models: Path, trials: Trials) -> None:
    for _ in range(2):
        assert chosen(models) == str(models / "draft")
        assert trials.measured == [["small", "draft"]]
    # A model that is no candidate changes nothing, and needs no trial.
    write_directory(models / "foreign", model_files(tokenizer__json=tokenizer(OTHER_WORDS)))
    assert DraftChooser(str(models / "target"), [models]).recall() is None
    assert chosen(models) == str(models / "draft")
    assert trials.measured == [["small", "draft"]]
    # A new candidate is measured, and it alone.
    write_directory(models / "new", model_files(model__safetensors=weights(size=12)))
    assert chosen(models) == str(models / "new")
    assert trials.measured == [["small", "draft"], ["new"]]
    # A candidate that is gone is not chosen.
    for path in (models / "new").iterdir():
        path.unlink()
    (models / "new").rmdir()
    assert chosen(models) == str(models / "draft")
    # Other weights are another model.
    write_directory(models / "target", model_files(model__safetensors=weights(size=1001)))
    assert chosen(models) == str(models / "draft")
    assert trials.measured == [["small", "draft"], ["new"], ["small", "draft"]]


def test_a_repository_in_the_hubs_cache_is_a_target_and_a_draft(tmp_path: Path, trials: Trials) -> None:
    write_repository(tmp_path / "hub", "org/target", model_files(model__safetensors=weights(size=1000)))
    root = write_repository(tmp_path / "hub", "org/draft", model_files(model__safetensors=weights(size=10)))
    for _ in range(2):
        chooser = DraftChooser("org/target")
        assert chooser.is_here
        choice = chooser.recall() or chooser.choose(chooser.find().fitting)
        assert choice.chosen is not None
        assert choice.chosen.candidate.name == "org/draft"
        assert Path(choice.setting).parent == (root / "snapshots").resolve()
    assert trials.measured == [["org/draft"]]
    assert not DraftChooser("org/absent").is_here


def test_other_versions_devices_and_threads_have_other_records(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = record_path("target", THREADS)
    assert first == record_path("target", dict(THREADS))
    others = [record_path("other", THREADS), record_path("target", {**THREADS, "draft": 2})]
    for name, value in (("__version__", "9"), ("has_gpu", lambda: True), ("_version_of", lambda package: "9")):
        with monkeypatch.context() as patch:
            patch.setattr(f"specd.cli.pairs.record.{name}", value)
            others.append(record_path("target", THREADS))
    assert len({first, *others}) == 6


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"listing": 1}', "[" * 100_000, json.dumps({"listing": "", "fitting": [{}]})],
)
def test_a_damaged_record_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    assert PairRecord.kept_in(path) == PairRecord()


def test_a_record_is_kept_whole(tmp_path: Path) -> None:
    record = PairRecord("listing", CANDIDATES, TARGET, {"s": trial(0.9, 0.001)})
    record.keep(tmp_path / "record.json")
    assert PairRecord.kept_in(tmp_path / "record.json") == record
    assert list(tmp_path.iterdir()) == [tmp_path / "record.json"]


def test_a_pair_that_surely_does_not_fit_has_a_problem_with_the_numbers() -> None:
    target, draft = ModelMemory("big", 16_400_000_000, 10**9), ModelMemory("little", 1_200_000_000, 10**9)
    problem = PairMemory(target, draft, there=17_000_000_000, free=17_000_000_000).problem
    for number in ("16.4 GB", "1.2 GB", "17.6 GB together", "has 17.0 GB", "--draft lookup"):
        assert number in problem
    assert PairMemory(target, None, there=17_000_000_000).problem == ""
    assert "2 x 16.4 GB" in PairMemory(target, None, 2, there=17_000_000_000).problem
    assert PairMemory(target, draft).problem == ""


def test_a_pair_that_may_not_fit_has_a_warning_alone() -> None:
    target, draft = ModelMemory("big", 4_000_000_000, 10**9), ModelMemory("little", 1_000_000_000, 10**9)
    for free, warns in ((6_900_000_000, True), (7_000_000_000, False)):
        pair = PairMemory(target, draft, there=8_000_000_000, free=free)
        assert pair.problem == ""
        assert bool(pair.warning) == warns


@pytest.mark.parametrize(
    ("options", "chooses"),
    [
        ({}, False),
        ({"target": "x"}, True),
        ({"target": "x", "draft": "auto"}, True),
        ({"target": "x", "draft": "none"}, False),
        ({"target": "x", "draft": "lookup"}, False),
        ({"target": "x", "draft": "y"}, False),
        ({"target": "x", "target_ranks": "2"}, False),
        ({"target": EMBEDDED_TARGET, "draft": "auto"}, False),
    ],
)
def test_up_chooses_for_a_target_without_a_draft(options: dict[str, str], chooses: bool) -> None:
    assert load_settings(UpSettings, options).chooses_draft == chooses


def test_a_chosen_draft_is_a_setting_like_a_given_one() -> None:
    settings = load_settings(UpSettings, {"target": "x", "draft_in_target": True})
    assert settings.with_draft("/draft").self_draft == "/draft"
    assert settings.with_draft(OWN_HEAD).self_draft == OWN_HEAD
    assert settings.with_draft(LOOKUP_ALONE).self_draft == ""
    chosen = load_settings(UpSettings, {"target": "x"}).with_draft("/head", in_target=True)
    assert (chosen.self_draft, chosen.draft_worker_model) == ("/head", "")
    assert settings.with_draft(LOOKUP_ALONE).source_settings() == {}
    without = load_settings(UpSettings, {"target": "x", "lookup": False}).with_draft(LOOKUP_ALONE)
    assert without.source_settings() == {"lookup": False}
    assert without.draft_worker_model == ""


def test_a_directory_that_is_none_is_refused() -> None:
    with pytest.raises(StartupError, match="--draft-dirs: '/nowhere' is not a directory"):
        load_settings(UpSettings, {"draft_dirs": "/nowhere"})


def test_siblings_to_download_are_those_of_the_family() -> None:
    assert siblings_of("mlx-community/Qwen3-8B-4bit", []) == ["mlx-community/Qwen3-0.6B-4bit"]
    assert siblings_of("Qwen3-8B-4bit", ["mlx-community/Qwen3-0.6B-4bit"]) == []
    for name in ("mlx-community/Qwen3-0.6B-4bit", "mlx-community/Qwen3-Next-80B-A3B-4bit", "org/Qwen3-8B-x/y", "llama"):
        assert siblings_of(name, []) == []


def test_a_model_in_the_hubs_cache_has_the_name_of_its_repository() -> None:
    path = "/home/me/.cache/huggingface/hub/models--org--small-model/snapshots/0a1b"
    assert short_name_of(path) == "small-model"
    assert short_name_of("org/small-model") == short_name_of("/models/small-model") == "small-model"
    info = ModelInfo(path, "llama", "", "", 1, 1, (), "", "")
    assert info.public_name == "org/small-model"
    assert info.short_name == "small-model"
