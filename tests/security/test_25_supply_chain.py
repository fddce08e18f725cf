"""Check 25: what is installed is pinned by hash, what is read runs no code, and a container can do nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_compose_files import FILES, services_of

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for package in ("specd", "coordinator", "draft_worker", "target_worker", "deploy", "benchmarks", "examples")
    for path in (ROOT / package).rglob("*.py")
)
LOCKS = [ROOT / "requirements.lock", *sorted((ROOT / "deploy" / "locks").glob("*.lock"))]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()

# Modules and functions that run code in the data that they read, or a shell on their arguments.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"}
UNSAFE_YAML = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"}
# Without this keyword, or with another value, the call runs what it reads.
SAFE_KEYWORD = {"torch.load": ("weights_only", True)}
UNSAFE_KEYWORDS = {("allow_pickle", True), ("trust_remote_code", True), ("shell", True)}


def dangers(source: str) -> Iterator[str]:
    """Yield what runs code of others in a source, by line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            names = set()
        yield from (f"{node.lineno}: import {name}" for name in sorted(names & MODULES))  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {
            (keyword.arg, keyword.value.value) for keyword in node.keywords if isinstance(keyword.value, ast.Constant)
        }
        if name in CALLS | UNSAFE_YAML or keywords & UNSAFE_KEYWORDS:
            yield f"{node.lineno}: {ast.unparse(node)}"
        if name in SAFE_KEYWORD and SAFE_KEYWORD[name] not in keywords:
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.memory",
        "numpy.load(path, allow_pickle=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "eval(text)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_the_search_finds_what_runs_code(source: str) -> None:
    assert len(list(dangers(source))) == 1


def test_no_source_runs_code_that_comes_with_data() -> None:
    assert len(SOURCES) > 100
    found = [f"{path.relative_to(ROOT)}:{danger}" for path in SOURCES for danger in dangers(path.read_text())]
    assert found == []


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_package_of_a_lock_is_pinned_by_hash(path: Path) -> None:
    packages = re.split(r"^(?=[\w.-]+(?:\[[\w,-]+\])?==)", path.read_text(), flags=re.MULTILINE)[1:]
    assert packages
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", package, re.MULTILINE), package
    others = re.findall(r"^(?![\w.-]+(?:\[[\w,-]+\])?==|    --hash=sha256:|#|$).*$", path.read_text(), re.MULTILINE)
    assert others == []  # no option, no address, no path


def test_images_install_nothing_without_its_hash_and_build_nothing_from_sources() -> None:
    installs = re.findall(r"^.*\bpip\b.* install .*$", DOCKERFILE, re.MULTILINE)
    assert installs
    for install in installs:
        ours = "--no-index --no-deps dist/*.whl" in install
        assert ours or "--require-hashes --no-deps --only-binary :all: -r " in install, install
    assert not re.search(r"\b(curl|wget|git clone|ADD http)", DOCKERFILE)


def test_images_run_as_nobody_in_particular() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    runtime = next(stage for stage in stages if " AS runtime\n" in stage)
    (user,) = re.findall(r"^USER (\S+)$", runtime, re.MULTILINE)
    assert int(user) >= 10_000
    for stage in stages:  # what is based on it never turns root again
        assert "USER" not in stage.replace(f"USER {user}", "")
    finals = [stage for stage in stages if re.match(r"\S+ AS (coordinator|worker|worker-cuda)\n", stage)]
    assert len(finals) == 3
    assert all(stage.startswith(("runtime ", "worker-runtime ")) for stage in finals)


@pytest.mark.parametrize("file", FILES)
def test_a_service_has_a_read_only_root_and_no_capability(file: str) -> None:
    for name, service in services_of(file).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "devices", "pid", "ipc", "network_mode", "userns_mode"} & set(service), (
            name
        )
        assert not [volume for volume in service.get("volumes", []) if "docker.sock" in volume], name
