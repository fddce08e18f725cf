"""The sources of a command's settings, and its messages about invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.e2e.processes import complaint, run_specd


def test_flag_over_variable_over_file(tmp_path: Path) -> None:
    """Every value is wrong, and the complaint names the one that counts."""
    path = str(tmp_path / "settings.toml")
    Path(path).write_text("[coordinator]\nnum_draft_tokens = 41\n")
    variable = {"SPECD_COORDINATOR_NUM_DRAFT_TOKENS": "42"}
    for arguments, variables, counts in (
        (["--config", path, "coordinator", "--num-draft-tokens", "43"], variable, "--num-draft-tokens: '43'"),
        (["--config", path, "coordinator"], variable, "SPECD_COORDINATOR_NUM_DRAFT_TOKENS: '42'"),
        (["--config", path, "coordinator"], {}, "[coordinator] num_draft_tokens: '41'"),
        (["coordinator"], {"SPECD_CONFIG": path}, "[coordinator] num_draft_tokens: '41'"),
    ):
        done = run_specd(*arguments, **cast(Any, variables))
        assert done.returncode == 2
        assert counts in complaint(done.stderr)


def test_the_file_in_the_working_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "specd.toml").write_text("[coordinator]\nnum_draft_tokens = 41\n")
    done = run_specd("coordinator", directory=tmp_path)
    assert done.returncode == 2
    assert "[coordinator] num_draft_tokens: '41'" in complaint(done.stderr)


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        pytest.param(["coordinator", "--num-draft-tokens", "many"], {}, "'many'", id="flag is no number"),
        pytest.param(["coordinator", "--num-draft-tokens", "-1"], {}, "'-1'", id="flag out of range"),
        pytest.param(["draft-worker", "--blas-threads", "0"], {}, "--blas-threads", id="no threads"),
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
    done = run_specd(*arguments, **cast(Any, variables))
    assert done.returncode == 2
    assert named in complaint(done.stderr)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "specd.toml").write_bytes(b"\xff\xfe")
    done = run_specd("coordinator", directory=tmp_path)
    assert done.returncode == 2
    assert "specd.toml" in complaint(done.stderr)
