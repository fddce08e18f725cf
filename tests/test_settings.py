"""Where settings come from, and what is said about wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specd.cli.options import load_settings
from specd.errors import StartupError
from specd.settings import CoordinatorSettings, LogSettings, TargetWorkerSettings, UpSettings
from tests.processes import complaint, run_specd

WriteSettings = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the shell that runs the tests sets."""
    for prefix in ("SPECD_", "SPECD_COORDINATOR_", "SPECD_TARGET_WORKER_"):
        for name in ("CONFIG", "LOG_LEVEL", "LOG_FORMAT", *CoordinatorSettings.model_fields):
            monkeypatch.delenv(f"{prefix}{name}".upper(), raising=False)


@pytest.fixture
def write_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteSettings:
    """Write the settings file that SPECD_CONFIG names."""

    def write(content: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(content)
        monkeypatch.setenv("SPECD_CONFIG", str(path))
        return path

    return write


def test_flag_over_variable_over_file_over_default(
    write_settings: WriteSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings(CoordinatorSettings, {}).given_num_draft_tokens is None
    write_settings("[coordinator]\nnum_draft_tokens = 5\n")
    assert load_settings(CoordinatorSettings, {}).given_num_draft_tokens == 5
    monkeypatch.setenv("SPECD_COORDINATOR_NUM_DRAFT_TOKENS", "6")
    assert load_settings(CoordinatorSettings, {}).given_num_draft_tokens == 6
    assert load_settings(CoordinatorSettings, {"num_draft_tokens": "7"}).given_num_draft_tokens == 7
    assert load_settings(CoordinatorSettings, {"num_draft_tokens": "auto"}).given_num_draft_tokens is None


def test_the_command_line_obeys_the_same_order(write_settings: WriteSettings) -> None:
    """Every value is wrong, and the complaint names the one that counts."""
    path = str(write_settings("[coordinator]\nnum_draft_tokens = 41\n"))
    variable = {"SPECD_COORDINATOR_NUM_DRAFT_TOKENS": "42"}
    for arguments, variables, counts in (
        (["--config", path, "coordinator", "--num-draft-tokens", "43"], variable, "43"),
        (["--config", path, "coordinator"], variable, "42"),
        (["--config", path, "coordinator"], {}, "41"),
        (["coordinator"], {"SPECD_CONFIG": path}, "41"),
    ):
        done = run_specd(*arguments, **variables)
        assert done.returncode == 2
        message = complaint(done.stderr)
        assert "num_draft_tokens" in message
        assert counts in message


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECD_COORDINATOR_NUM_DRAFT_TOKENS", "")
    assert load_settings(CoordinatorSettings, {}).num_draft_tokens == "auto"


def test_every_command_has_its_table(write_settings: WriteSettings) -> None:
    write_settings(
        'log_level = "debug"\n'
        '[coordinator]\nlisten = "unix:/tmp/c"\n'
        '[target-worker]\nlisten = "unix:/tmp/t"\n'
        '[up]\nlisten = "unix:/tmp/u"\nmetrics = false\n'
    )
    assert load_settings(LogSettings, {}).log_level == "debug"
    assert load_settings(CoordinatorSettings, {}).listen == "unix:/tmp/c"
    assert load_settings(TargetWorkerSettings, {}).listen == "unix:/tmp/t"
    assert load_settings(UpSettings, {}).listen == "unix:/tmp/u"
    assert load_settings(UpSettings, {}).metrics is False


def test_the_file_in_the_working_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "specd.toml").write_text("[coordinator]\nnum_draft_tokens = 41\n")
    done = run_specd("coordinator", directory=tmp_path)
    assert done.returncode == 2
    assert "got 41" in complaint(done.stderr)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param("[coordinator]\nnum_drafts = 3\n", "num_drafts", id="unknown entry in a table"),
        pytest.param("[coordinater]\nnum_draft_tokens = 3\n", "coordinater", id="unknown table"),
        pytest.param("num_draft_tokens = 3\n", "num_draft_tokens", id="entry outside its table"),
        pytest.param("coordinator = 3\n", "coordinator is 3", id="value for a table"),
        pytest.param("[coordinator]\nlisten = 5\n", "listen", id="wrong type"),
        pytest.param("[coordinator]\nlisten = 'here'\n", "'here'", id="wrong address"),
        pytest.param("[coordinator]\ndraft_timeout_seconds = 0\n", "draft_timeout_seconds", id="zero seconds"),
        pytest.param("[coordinator\n", "settings.toml", id="not TOML"),
    ],
)
def test_a_wrong_entry_in_the_file_is_named(write_settings: WriteSettings, content: str, named: str) -> None:
    write_settings(content)
    with pytest.raises(StartupError) as raised:
        load_settings(CoordinatorSettings, {})
    assert named in str(raised.value)


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(StartupError) as raised:
        load_settings(CoordinatorSettings, {"num_draft_tokens": "many", "draft_timeout_seconds": "-1"})
    for named in ("num_draft_tokens", "'many'", "draft_timeout_seconds", "'-1'"):
        assert named in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        pytest.param(["coordinator", "--num-draft-tokens", "many"], {}, "'many'", id="flag is no number"),
        pytest.param(["coordinator", "--num-draft-tokens", "-1"], {}, "'-1'", id="flag out of range"),
        pytest.param(["draft-worker", "--blas-threads", "0"], {}, "blas_threads", id="no threads"),
        pytest.param(["up", "--num-draft-tokens", "33"], {}, "'33'", id="too many draft tokens"),
        pytest.param(["coordinator"], {"SPECD_COORDINATOR_DRAFT_TIMEOUT_SECONDS": "soon"}, "'soon'", id="variable"),
        pytest.param(["--log-level", "loud", "coordinator"], {}, "'loud'", id="log level"),
        pytest.param(["coordinator"], {"SPECD_LOG_FORMAT": "xml"}, "'xml'", id="log format"),
        pytest.param(["--config", "missing.toml", "coordinator"], {}, "missing.toml", id="no such file"),
        pytest.param(["--config", "/", "coordinator"], {}, "settings file /", id="file is a directory"),
    ],
)
def test_a_command_refuses_wrong_settings_in_a_line(
    arguments: list[str], variables: dict[str, str], named: str
) -> None:
    done = run_specd(*arguments, **variables)
    assert done.returncode == 2
    assert named in complaint(done.stderr)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "specd.toml").write_bytes(b"\xff\xfe")
    done = run_specd("coordinator", directory=tmp_path)
    assert done.returncode == 2
    assert "specd.toml" in complaint(done.stderr)
