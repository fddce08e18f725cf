"""Headers of safetensors files: an accepted file is loaded as described, and any other gets a plain refusal."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from specd.errors import StartupError
from specd.worker.model.safetensors_file import tensor_names

Header = dict[str, Any]


def sound_file(directory: Path) -> bytes:
    """Return what MLX writes for tensors of several types and shapes."""
    tensors = {
        "a.weight": mx.arange(12, dtype=mx.float32).reshape(3, 4),
        "a.scales": mx.ones((3, 2), mx.bfloat16),
        "b.weight": mx.arange(8, dtype=mx.uint32).reshape(2, 1, 4),
        "scalar": mx.array(7, mx.int8),
    }
    path = directory / "sound.safetensors"
    mx.save_safetensors(str(path), tensors, metadata={"format": "mlx"})
    return path.read_bytes()


def split(content: bytes) -> tuple[Header, bytes]:
    (num_bytes,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + num_bytes]), content[8 + num_bytes :]


def joined(header: Header | str | bytes, data: bytes) -> bytes:
    text = json.dumps(header) if isinstance(header, dict) else header
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded + data


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return sound_file(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated") / "model.safetensors"


def is_refused(path: Path, content: bytes) -> bool:
    """Return whether a file is refused. An accepted file must be the same for the format's own library and for MLX."""
    path.write_bytes(content)
    try:
        names = tensor_names(path)
    except StartupError as error:
        assert str(path) in str(error)
        assert len(str(error)) < 1000
        return True
    with safe_open(path, "numpy") as reference:
        assert sorted(reference.keys()) == sorted(names)
    loaded: Any = mx.load(str(path))
    assert sorted(loaded) == sorted(names)
    mx.eval(loaded)
    assert sum(array.nbytes for array in loaded.values()) == len(split(content)[1])
    return False


numbers = st.integers(-3, 60) | st.sampled_from([2**31, 2**32 + 4, 2**63, 2**64 - 4, 10**400, True, None, 1.0, "4"])
values = st.one_of(
    numbers,
    st.lists(numbers, max_size=3),
    st.sampled_from(["F32", "BF16", "U8", "F64", "F4", "", "f32", "I64", "F8_E5M2"]),
    st.dictionaries(st.sampled_from(["dtype", "x"]), numbers),
)


@given(data=st.data())
def test_entries_that_are_changed_are_refused_or_true(data: st.DataObject, content: bytes, path: Path) -> None:
    header, tensors = split(content)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from([*header, "new"]))
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra", None]))
        if field is None or not isinstance(header.get(name), dict):
            header[name] = data.draw(values | st.sampled_from(list(header.values())))
        elif field == "data_offsets" and data.draw(st.booleans()):
            header[name][field] = [data.draw(numbers), data.draw(numbers)]
        else:
            header[name][field] = data.draw(values)
    is_refused(path, joined(header, tensors))


@given(data=st.data())
def test_bytes_that_are_changed_are_refused_or_true(data: st.DataObject, content: bytes, path: Path) -> None:
    mutated = bytearray(content)
    (num_bytes,) = struct.unpack("<Q", content[:8])
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, 7 + num_bytes))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(-40, 40))
    is_refused(path, bytes(mutated[:end] if end < 0 else mutated + bytes(end)))


def changed(change: Callable[[Header], object]) -> Callable[[bytes], bytes]:
    def make(content: bytes) -> bytes:
        header, data = split(content)
        change(header)
        return joined(header, data)

    return make


NO_METADATA: tuple[Any, ...] = (0, False, "", [])


def with_metadata(value: Any) -> Callable[[Header], object]:
    return lambda header: header.update(__metadata__=value)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "a length alone": lambda content: content[:8],
    "a header beyond the file": lambda content: struct.pack("<Q", len(content)) + content[8:],
    "a header of 2^63 bytes": lambda content: struct.pack("<Q", 2**63) + content[8:],
    "offsets past the file": lambda content: content[:-1],
    "bytes behind the tensors": lambda content: content + b"\0",
    "tensors that overlap": changed(lambda h: h["b.weight"].update(data_offsets=[0, 32])),
    "a gap": changed(lambda h: h.pop("a.weight")),
    "a shape of another size": changed(lambda h: h["a.weight"].update(shape=[3, 5])),
    "a shape that overflows": changed(lambda h: h["a.weight"].update(shape=[2**31 - 1] * 3)),
    **{f"metadata that are {value!r}": changed(with_metadata(value)) for value in NO_METADATA},
    "a negative shape": changed(lambda h: h["a.weight"].update(shape=[-3, -4])),
    "offsets turned round": changed(lambda h: h["a.weight"]["data_offsets"].reverse()),
    "a type that MLX does not load": changed(lambda h: h["a.weight"].update(dtype="F64", shape=[6])),
    "an entry that is not an object": changed(lambda h: h.update(more=3)),
    "metadata that is no text": changed(lambda h: h.update(__metadata__={"format": 3})),
    "a list": lambda content: joined("[]", b""),
    "nested 100,000 deep": lambda content: joined("[" * 100_000 + "]" * 100_000, b""),
    "another encoding": lambda content: joined("{}".encode("utf-16"), b""),
    "a name twice": lambda content: joined(
        '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        ' "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        b"\0",
    ),
    "a number of 5,000 digits": lambda content: joined(
        f'{{"a": {{"dtype": "U8", "shape": [{"9" * 5000}], "data_offsets": [0, 1]}}}}', b"\0"
    ),
    "NaN": lambda content: joined('{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', b"\0"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case: str, content: bytes, path: Path) -> None:
    assert is_refused(path, BROKEN[case](content))


def test_a_sound_file_is_not(content: bytes, path: Path) -> None:
    assert not is_refused(path, content)
    header, data = split(content)
    assert not is_refused(path, joined(json.dumps(header) + " " * 100, data))


def test_the_headers_of_a_large_model_take_well_under_a_second(path: Path) -> None:
    """As many tensors as 70 B parameters have, in 30 files of 4.7 GB; as sparse files they take no room."""
    seconds = 0.0
    for shard in range(30):
        header, end = {}, 0
        for i in range(25):
            header[f"model.layers.{shard}.part{i}.weight"] = {
                "dtype": "BF16",
                "shape": [8192, 11468],
                "data_offsets": [end, end := end + 2 * 8192 * 11468],
            }
        with path.open("wb") as file:
            file.write(joined(header, b""))
            file.truncate(file.tell() + end)
        began = time.perf_counter()
        assert len(tensor_names(path)) == 25
        seconds += time.perf_counter() - began
    path.unlink()
    assert seconds < 1
