"""The sources of settings, and the messages about invalid ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specd.cli.variables import misspelt_variables
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import StartupError
from specd.machine import available_cpus, available_memory, total_memory
from specd.settings import LogSettings, TargetWorkerSettings, load_settings
from specd.up_settings import UpSettings

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
    for named in ("--num-draft-tokens", "'many'", "--draft-timeout-seconds", "'-1'"):
        assert named in str(raised.value)


@pytest.mark.parametrize("value", ["-5", "x", "8GiX"])
def test_a_number_of_bytes_is_named_where_it_stands(
    value: str, write_settings: WriteSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = f"is '{value}': it must be a number of bytes, such as 512MiB or 8GiB"
    write_settings(f"[target-worker]\ncache_bytes = '{value}'\n")
    with pytest.raises(StartupError, match=rf"^wrong settings: \[target-worker\] cache_bytes {wrong}$"):
        load_settings(TargetWorkerSettings, {})
    monkeypatch.setenv("SPECD_TARGET_WORKER_CACHE_BYTES", value)
    with pytest.raises(StartupError, match=f"^wrong settings: SPECD_TARGET_WORKER_CACHE_BYTES {wrong}$"):
        load_settings(TargetWorkerSettings, {})
    with pytest.raises(StartupError, match=f"^wrong settings: --cache-bytes {wrong}$"):
        load_settings(TargetWorkerSettings, {"cache_bytes": value})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("listen", "127.0.0.1:70000", "--listen: '127.0.0.1:70000' has the port 70000: it must be 0 to 65535"),
        ("draft_timeout_seconds", "x", "--draft-timeout-seconds is 'x': it must be a number"),
        ("max_sessions", "0", "--max-sessions is '0': it must be greater than or equal to 1"),
        ("canary_share", "0.7", "--canary-share is '0.7': it must be less than or equal to 0.5"),
        ("lookup", "maybe", "--lookup is 'maybe': it must be true or false"),
    ],
)
def test_a_value_is_shown_once(name: str, value: str, says: str) -> None:
    with pytest.raises(StartupError) as raised:
        load_settings(CoordinatorSettings, {name: value})
    assert str(raised.value) == f"wrong settings: {says}"


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("none", "canary_draft is unix:/c, but it needs a draft to be compared with: set draft"),
        ("unix:/d,unix:/c", "draft and canary_draft both have unix:/c: name each worker in one of them"),
    ],
)
def test_a_canary_needs_another_draft_to_be_compared_with(draft: str, says: str) -> None:
    with pytest.raises(StartupError) as raised:
        load_settings(CoordinatorSettings, {"draft": draft, "canary_draft": "unix:/c"})
    assert str(raised.value) == f"wrong settings: {says}"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
        # A quota of a group that this one is in.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        # In a container, /proc may name a group of the host.
        (
            {
                "proc/self/cgroup": "4:cpu:/docker/1234\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "garbage\n", "sys/fs/cgroup/cpu.max": "garbage\n"}, 8),
    ],
)
def test_cpus_are_those_that_the_process_may_use(
    files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)}, raising=False)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert available_cpus(tmp_path) == cpus


MIB = 2**20


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, None, None),
        (
            {
                "proc/self/cgroup": "0::/x/y\n",
                "sys/fs/cgroup/x/memory.max": f"{64 * MIB}\n",
                "sys/fs/cgroup/x/memory.current": f"{50 * MIB}\n",
                "sys/fs/cgroup/x/memory.stat": f"anon 1\ninactive_file {10 * MIB}\n",
                "sys/fs/cgroup/x/y/memory.max": "max\n",
                "sys/fs/cgroup/x/y/memory.current": "1\n",
                "sys/fs/cgroup/x/y/memory.stat": "anon 1\ninactive_file 0\n",
            },
            64 * MIB,
            24 * MIB,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{64 * MIB}\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{70 * MIB}\n",
                "sys/fs/cgroup/memory/x/memory.stat": f"inactive_file 5\ntotal_inactive_file {MIB}\n",
            },
            64 * MIB,
            -5 * MIB,
        ),
        ({"proc/self/cgroup": "garbage\n", "sys/fs/cgroup/memory.max": "garbage\n"}, None, None),
    ],
)
def test_memory_is_what_the_process_may_use(
    files: dict[str, str], total: int | None, available: int | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total_memory(tmp_path) == total or (total is None and total_memory(tmp_path) == of_machine)
    if available is not None:
        assert available_memory(tmp_path) == available
    else:
        assert 0 < available_memory(tmp_path) < of_machine


@pytest.mark.parametrize("value", ["many", "0", "-2", "1.5", "²"])
def test_threads_that_are_no_number_are_refused_with_the_value(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", value)
    with pytest.raises(StartupError, match=f"OPENBLAS_NUM_THREADS is '{value}'"):
        load_settings(TargetWorkerSettings, {})
    assert load_settings(TargetWorkerSettings, {"blas_threads": 3}).blas_threads == 3


# -- Who gets in

FILES = {"tls_cert": "a.crt", "tls_key": "a.key"}


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/tmp/s"])
def test_this_machine_needs_no_credentials(listen: str) -> None:
    assert load_settings(CoordinatorSettings, {"listen": listen}).listen == listen
    assert load_settings(TargetWorkerSettings, {"listen": listen}).listen == listen


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "gpu.example.org:1", "localhost.example.org:1", "ipv4:0.0.0.0:1"]
)
@pytest.mark.parametrize("name", ["listen", "metrics_listen", "ranks_listen"])
def test_other_machines_do(name: str, listen: str) -> None:
    with pytest.raises(StartupError) as raised:
        load_settings(TargetWorkerSettings, {name: listen})
    message = str(raised.value)
    assert f"{name} is {listen}" in message
    assert "--tls-ca" in message
    assert "--insecure" in message
    assert "--tokens" not in message
    with pytest.raises(StartupError, match="--tls-ca"):
        load_settings(TargetWorkerSettings, {name: listen, **FILES})
    assert load_settings(TargetWorkerSettings, {name: listen, **FILES, "tls_ca": "ca.crt"})
    assert load_settings(TargetWorkerSettings, {name: listen, "insecure": "true"})


def test_tokens_open_the_port_for_clients_and_no_other() -> None:
    with pytest.raises(StartupError, match="--tls-ca or --tokens"):
        load_settings(CoordinatorSettings, {"listen": "0.0.0.0:1", **FILES})
    with pytest.raises(StartupError, match="--tls-cert"):
        load_settings(CoordinatorSettings, {"listen": "0.0.0.0:1", "tokens": "t"})
    assert load_settings(CoordinatorSettings, {"listen": "0.0.0.0:1", **FILES, "tokens": "t"})
    with pytest.raises(StartupError, match="metrics_listen is 0"):
        load_settings(CoordinatorSettings, {"metrics_listen": "0.0.0.0:1", **FILES, "tokens": "t"})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tls_cert": "a.crt"}, "tls_cert is set, but tls_key is not"),
        ({"tls_key": "a.key"}, "tls_key is set, but tls_cert is not"),
        ({"tls_ca": "ca.crt"}, "tls_ca is set, but tls_cert is not"),
    ],
)
def test_half_of_the_files_is_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        load_settings(TargetWorkerSettings, given)


def test_an_unknown_name_in_a_table_says_which_it_may_mean(write_settings: WriteSettings) -> None:
    write_settings("[up]\ntarrget = 'x'\nnumber = 5\n")
    with pytest.raises(StartupError) as refused:
        load_settings(UpSettings, {})
    assert str(refused.value) == ("wrong settings: [up] has no 'tarrget': did you mean 'target'?; [up] has no 'number'")


def test_an_unknown_table_says_which_it_may_mean(write_settings: WriteSettings) -> None:
    write_settings("[target_worker]\nmodel = 'x'\n")
    with pytest.raises(StartupError, match=r"unknown entries: 'target_worker': did you mean 'target-worker'\?$"):
        load_settings(UpSettings, {})


def test_the_certificate_of_a_client_is_not_that_of_up(
    write_settings: WriteSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECD_TLS_CERT", "client.crt")
    assert load_settings(UpSettings, {}).tls_cert == ""
    write_settings("[up]\ntls_cert = 'up.crt'\n")
    assert load_settings(UpSettings, {}).tls_cert == "up.crt"
    monkeypatch.setenv("SPECD_COORDINATOR_TLS_CERT", "coordinator.crt")
    assert load_settings(UpSettings, {}).tls_cert == "coordinator.crt"
    assert load_settings(UpSettings, {"tls_cert": "flag.crt"}).tls_cert == "flag.crt"
    assert load_settings(UpSettings, {"tls_cert": "none"}).tls_cert == ""


def test_variables_that_are_close_to_one_are_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert misspelt_variables() == {}
    for name in ("SPECD_TARRGET", "SPECD_COORDINATOR_MAX_SESSION", "SPECD_SERVICE_HOST", "SPECD_TARGET"):
        monkeypatch.setenv(name, "x")
    assert misspelt_variables() == {
        "SPECD_TARRGET": "SPECD_TARGET",
        "SPECD_COORDINATOR_MAX_SESSION": "SPECD_COORDINATOR_MAX_SESSIONS",
    }
