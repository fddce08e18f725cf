"""`specd convert`: what it writes loads and computes what its source does, and what it cannot do it says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import sentencepiece
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3 as qwen3_class
from tokenizers import Tokenizer

from specd.errors import StartupError
from specd.settings import EMBEDDED_DRAFT
from specd.worker.model import conversion
from specd.worker.model.loader import load, read
from specd.worker.model.t5.network import T5
from tests.worker.gpt2_models import save_gpt2, weights_on_the_hub
from tests.worker.models import save_tiny
from tests.worker.t5_models import save_t5

PROMPT = [5, 17, 300, 42]
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def convert(source: str | Path, out: Path, **changes: Any) -> str:
    options: dict[str, Any] = {"bits": None, "group_size": 32, "dtype": None, "check": False, "progress": silent}
    return conversion.convert(str(source), out, **options | changes)


def silent(items: Sequence[Any], _: str) -> Iterable[Any]:
    return items


def logits_of(directory: Path | str) -> np.ndarray:
    """Return the logits [4, rows] of a model, as float32; of a T5, its answer is the prompt."""
    network, _, _ = read("model", Path(directory))
    network.set_dtype(mx.float32)
    if not isinstance(network, T5):
        return np.array(network(mx.array([PROMPT]))[0])
    *_, encoded = network.encode(mx.array([PROMPT]))
    caches = network.make_cache()
    network.read(encoded, caches)
    return np.array(network(mx.array([PROMPT]), caches)[0])


def weights_of(directory: Path | str) -> dict[str, np.ndarray]:
    network, _, _ = read("model", Path(directory))
    pairs: Any = tree_flatten(network.parameters())
    return {name: np.array(array) for name, array in pairs}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_t5(tmp_path_factory.mktemp("t5") / "model")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    network = qwen3_class.Model(qwen3_class.ModelArgs.from_dict(QWEN3))
    return save_tiny(tmp_path_factory.mktemp("qwen3") / "model", QWEN3, network, noise=0.1)


@pytest.mark.parametrize("kind", ["t5", "qwen3"])
@pytest.mark.parametrize(("options", "tolerance"), [({}, 0), ({"dtype": "bfloat16"}, 0.05), ({"bits": 8}, 0.05)])
def test_a_copy_computes_what_its_source_does(
    kind: str, options: dict[str, Any], tolerance: float, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(kind)
    convert(source, tmp_path / "out", **options)
    expected, own = logits_of(source), logits_of(tmp_path / "out")
    assert np.max(np.abs(own - expected)) <= tolerance * np.max(np.abs(expected))
    assert bool(np.any(own != expected)) == bool(options)  # it did round
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_quantised_copy_is_small_and_served(qwen3: str, tmp_path: Path) -> None:
    convert(qwen3, tmp_path / "out", bits=4)
    sizes = [Path(directory, "model.safetensors").stat().st_size for directory in (qwen3, tmp_path / "out")]
    assert sizes[1] < 0.2 * sizes[0]  # 4 of 32 bits, and a scale and a bias of 32 each for every 32 weights
    model = load(str(tmp_path / "out"), blas="")
    assert model.info.eos_token_ids == load(qwen3, blas="").info.eos_token_ids


def test_a_t5_keeps_its_position_biases_and_names_in_full_precision(t5: str, tmp_path: Path) -> None:
    convert(t5, tmp_path / "out", bits=4, dtype="bfloat16")
    named: Any = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert named["relative_positions.weight"].dtype == mx.bfloat16
    assert named["layers.0.cross_attention.q.weight"].dtype == mx.uint32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_gpt2_as_it_is_on_the_hub(tmp_path: Path) -> None:
    source = save_gpt2(tmp_path / "source", weights_on_the_hub("transformer."))
    convert(source, tmp_path / "out")
    own, expected = weights_of(tmp_path / "out"), weights_of(source)
    assert own.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(own[name], array, err_msg=name)
    # The source's matrices lie the other way round in memory, and the BLAS may sum those in another order.
    np.testing.assert_allclose(logits_of(tmp_path / "out"), logits_of(source), rtol=0, atol=1e-5)


def test_a_sentencepiece_model_becomes_a_tokenizer(tmp_path: Path) -> None:
    source = Path(save_t5(tmp_path / "source", vocab_size=640, eos_token_id=1))
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    # Without its file, transformers makes a vocabulary of a hundred tokens, and says nothing.
    with pytest.raises(
        StartupError, match=r"tokenizer \d+: add the missing file of the tokenizer, such as tok.*spiece"
    ):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()

    texts = [path.read_text() for path in sorted(Path(conversion.__file__).parent.glob("*.py"))]
    lines = iter("\n".join(texts).splitlines())
    options: Any = {"vocab_size": 540, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_prefix=str(source / "spiece"), **options)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(source / "spiece.model"))
    convert(source, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "the weights of a model"
    assert tokenizer.encode(text).ids == [*pieces.encode(text), 1]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_what_is_refused(t5: str, qwen3: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="is quantised already: convert the model from which it was made"):
        convert(EMBEDDED_DRAFT, tmp_path / "out", bits=4)
    with pytest.raises(StartupError, match="the model nothing does not exist: name a local directory or"):
        convert("nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartupError, match=r"has no config\.json"):
        convert(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"has no weights \(model\*.safetensors or pytorch_model\*.bin\)"):
        convert(tmp_path / "empty", tmp_path / "out")
    broken = Path(shutil.copytree(t5, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(StartupError, match="not a valid safetensors file"):
        convert(broken, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "empty"]
    convert(qwen3, tmp_path / "out")
    with pytest.raises(StartupError, match="out exists already: choose another directory, or remove it"):
        convert(qwen3, tmp_path / "out")


def test_without_pytorch_pickles_are_refused_and_nothing_is_compared(
    t5: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import fails
    assert "PyTorch is not installed" in convert(t5, tmp_path / "copy", check=True)
    pickled = pickle_of(t5, tmp_path / "pickled", b"")
    with pytest.raises(
        StartupError, match=r"as pickle \(pytorch_model.bin\), which only PyTorch can read: pip install"
    ):
        convert(pickled, tmp_path / "out")


def test_pickles_are_read_safely(t5: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="`make test-convert` installs PyTorch")
    pickled = pickle_of(t5, tmp_path / "pickled", b"")
    network, _, _ = read("model", Path(t5))
    named: Any = tree_flatten(network.parameters())
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in named}
    tensors["lm_head.weight"] = tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]  # one memory
    torch.save(tensors, pickled / "pytorch_model.bin")
    convert(pickled, tmp_path / "out")
    np.testing.assert_array_equal(logits_of(tmp_path / "out"), logits_of(t5))

    torch.save({"shared.weight": RunsCode(str(tmp_path / "ran"))}, pickled / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"cannot read .*pytorch_model.bin safely"):
        convert(pickled, tmp_path / "other")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["t5", "qwen3"])
def test_the_first_tokens_are_compared(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="`make test-convert` installs PyTorch")
    source = request.getfixturevalue(kind)
    assert convert(source, tmp_path / "out", check=True) == "its first 8 greedy tokens are those of transformers"
    plain = read

    def read_wrongly(name: str, directory: Path, *, lazy: bool = False) -> Any:
        network, config, tokenizer = plain(name, directory, lazy=lazy)
        layer = (network.layers if isinstance(network, T5) else network.model.layers)[0]
        norm = layer.feed_forward_norm if isinstance(network, T5) else layer.input_layernorm
        norm.weight = -norm.weight
        return network, config, tokenizer

    monkeypatch.setattr(conversion, "read", read_wrongly)
    with pytest.raises(StartupError, match="computes other tokens than transformers"):
        convert(source, tmp_path / "wrong", check=True)
    assert not (tmp_path / "wrong").exists()


def test_the_command(t5: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specd", "convert", t5, str(tmp_path / "out"), "--quantize", "8", "--no-check"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, check=False)
    assert done.returncode == 0, done.stderr
    assert f"wrote {tmp_path}/out" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "out exists already: choose another directory" in " ".join(again.stderr.split())
    assert "Traceback" not in again.stderr


class RunsCode:
    """Creates a file when a pickle of it is loaded."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


def pickle_of(source: str, directory: Path, content: bytes) -> Path:
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    (directory / "pytorch_model.bin").write_bytes(content)
    return directory
