"""The files of a model's directory: links, pipes, sizes, indexes and duplicates, before anything reads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from specd.errors import StartupError
from specd.settings import EMBEDDED_DRAFT
from specd.worker.model.files import check_files
from specd.worker.model.loader import load


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the embedded draft."""
    return Path(shutil.copytree(EMBEDDED_DRAFT, tmp_path / "model"))


def shard(directory: Path, *, index: object = None) -> None:
    """Split the weights into two files; `index` replaces the true index."""
    tensors: dict[str, mx.array] = mx.load(str(directory / "model.safetensors"))  # type: ignore[assignment]
    names, files = sorted(tensors), [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, file in enumerate(files):
        mx.save_safetensors(str(directory / file), {name: tensors[name] for name in names[i::2]})
    (directory / "model.safetensors").unlink()
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index or weight_map}))


def link_outside(name: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        outside = directory.parent / name
        (directory / name).rename(outside)
        (directory / name).symlink_to(outside)

    return make


def link_up(directory: Path) -> None:
    """Lead out by a name that is inside."""
    (directory / "tokenizer.json").rename(directory.parent / "tokenizer.json")
    (directory / "inside").symlink_to("..")
    (directory / "tokenizer.json").symlink_to("inside/tokenizer.json")


def add_template_from_outside(directory: Path) -> None:
    (directory.parent / "templates").mkdir()
    (directory.parent / "templates" / "rag.jinja").write_text("{{ messages }}")
    (directory / "additional_chat_templates").symlink_to(directory.parent / "templates")


def add_pipe(directory: Path) -> None:
    os.mkfifo(directory / "special_tokens_map.json")


def grow(name: str, num_bytes: int) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).touch()
        os.truncate(directory / name, num_bytes)

    return make


def add_same_tensors(directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory / "model-of-before.safetensors")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights outside": (link_outside("model.safetensors"), "link out of"),
    "config outside": (link_outside("config.json"), "link out of"),
    "a link by way of another": (link_up, "link out of"),
    "templates outside": (add_template_from_outside, "link out of"),
    "a link to nothing": (lambda d: (d / "vocab.json").symlink_to("nothing"), "cannot be read"),
    "a pipe": (add_pipe, "replace it with a plain file"),
    "a directory": (lambda d: (d / "model-2.safetensors").mkdir(), "replace it with a plain file"),
    "a tokenizer of 1 GB": (grow("tokenizer.json", 10**9), "1000000000 bytes"),
    "a config of 2 MB": (grow("config.json", 2 * 10**6), "2000000 bytes"),
    "a template of 2 MB": (grow("chat_template.jinja", 2 * 10**6), "2000000 bytes"),
    "an index of 100 MB": (grow("model.safetensors.index.json", 10**8), "100000000 bytes"),
    "a config nested too deeply": (lambda d: (d / "config.json").write_text("[" * 10**5), "nested too deeply"),
    "an index that leads out": (lambda d: shard(d, index={"a": "../model.safetensors"}), "not a file beside it"),
    "an index with a path": (lambda d: shard(d, index={"a": "/etc/passwd"}), "not a file beside it"),
    "an index with a number": (lambda d: shard(d, index={"a": 3}), "not a file beside it"),
    "an index of more": (lambda d: shard(d, index={"a": "model-3.safetensors"}), "which is missing"),
    "an index without a map": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
        "no weight_map",
    ),
    "a tensor in two files": (add_same_tensors, "model-of-before.safetensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_before_it_is_read(case: str, directory: Path) -> None:
    change, why = REFUSED[case]
    change(directory)
    with pytest.raises(StartupError) as refused:
        check_files(directory)
    assert why in str(refused.value)
    assert str(directory) in str(refused.value)


def test_shards_with_an_index_are_loaded(directory: Path) -> None:
    shard(directory)
    assert load(str(directory), blas="").info.vocabulary_size == 8192


def test_links_within_the_directory_are_followed(directory: Path) -> None:
    (directory / "weights").mkdir()
    (directory / "model.safetensors").rename(directory / "weights" / "data")
    (directory / "model.safetensors").symlink_to("weights/data")
    check_files(directory)


@pytest.mark.parametrize("is_linked", [False, True])
def test_the_cache_of_the_hub_is_followed(directory: Path, is_linked: bool) -> None:
    """It keeps files by their digests, and links to them by their names."""
    repository = directory.parent / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, path in enumerate(directory.iterdir()):
        path.rename(repository / "blobs" / f"{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    named = snapshot
    if is_linked:  # as a user's own name for it
        named = directory.parent / "mine"
        named.symlink_to(snapshot)
    check_files(named)

    (snapshot / "config.json").unlink()
    (directory.parent / "hub" / "config.json").write_text("{}")
    (snapshot / "config.json").symlink_to("../../../config.json")  # of another repository
    with pytest.raises(StartupError, match="link out of"):
        check_files(named)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_a_directory_never_runs(name: str, directory: Path) -> None:
    """transformers would take a class from a file that `auto_map` names, or ask on the terminal whether to."""
    ran = directory / "ran"
    (directory / "code.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\nTokenizer = Config = 3\n"
    )
    classes = {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"], "AutoConfig": "code.Config"}
    changed = {**json.loads((directory / name).read_text()), "auto_map": classes}
    for unknown in ("tokenizer_class", "architectures"):
        changed[unknown] = "Unknown" if unknown == "tokenizer_class" else ["Unknown"]
    (directory / name).write_text(json.dumps(changed))
    try:
        load(str(directory), blas="")
    except StartupError as error:
        assert str(directory) in str(error)
    assert not ran.exists()
