"""Loading: what is refused and by which name, ties, and the cache file of packed weights."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig, Numerics
from core.errors import CheckpointError, UnsupportedModel
from core.execution.worker import ModelWorker, load_worker
from core.layers import Decoder
from core.quantization import quantise
from tests.fakes.gguf_writer import Tensor, Typed, write_gguf
from tests.fakes.plans import planned, step
from tests.fakes.tiny_llama import TinyShape, tiny_metadata, tiny_tensors, write_tiny_llama

SHAPE = TinyShape(vocab_size=64, num_layers=1, context=64, linear_type="Q4_1", embedding_type="Q8_0")


def load(path: Path, *, cache_dir: Path | str = "", numerics: Numerics = "stable") -> ModelWorker:
    config = EngineConfig(
        checkpoint=str(path), num_blocks=8, cache_dir=str(cache_dir), compile="off", numerics=numerics
    )
    return load_worker(config)


def logits(worker: ModelWorker) -> torch.Tensor:
    return worker.runner.logits(step(planned("a", range(3, 40), blocks=range(8), num_samples=37)))


def model_of(worker: ModelWorker) -> Decoder:
    model = worker.runner._model
    assert isinstance(model, Decoder)
    return model


def write_changed(
    path: Path,
    shape: TinyShape = SHAPE,
    *,
    metadata: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """The tiny checkpoint with some metadata or tensors replaced; None leaves an entry out."""
    entries = {**tiny_metadata(shape), **(metadata or {})}
    stored: dict[str, Tensor | None] = {
        name: Tensor(name, tensor.ggml_type, tuple(tensor.weight.shape), bytes(tensor.raw.flatten().tolist()))
        for name, tensor in tiny_tensors(shape).items()
    }
    stored.update(tensors or {})
    return write_gguf(
        path,
        {key: value for key, value in entries.items() if value is not None},
        tensors=[tensor for tensor in stored.values() if tensor is not None],
    )


def float_tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name, "F32", shape, bytes(4 * torch.Size(shape).numel()))


@pytest.mark.parametrize("name", sorted(tiny_tensors(SHAPE)))
def test_a_missing_tensor_is_named(name, tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", SHAPE, drop=name)
    with pytest.raises(CheckpointError, match=f"tensors are missing: {re.escape(name)}$") as refusal:
        load(path)
    assert refusal.value.path == str(path)


def test_many_missing_tensors_are_counted(tmp_path):
    names = [name for name in tiny_tensors(SHAPE) if name.startswith("blk.0")]
    path = write_changed(tmp_path / "tiny.gguf", tensors=dict.fromkeys(names))
    with pytest.raises(
        CheckpointError, match=r"tensors are missing: (blk\.0\.\w+\.weight, ){4}\S+ and 4 more"
    ):
        load(path)


def test_a_tensor_that_the_model_does_not_know_is_named(tmp_path):
    extra = float_tensor("blk.0.attn_q.bias", 64)
    path = write_tiny_llama(tmp_path / "tiny.gguf", SHAPE, extra=(extra,))
    with pytest.raises(UnsupportedModel, match=r"does not know the tensors blk\.0\.attn_q\.bias$"):
        load(path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_q.weight", (64, 32)),
        ("blk.0.ffn_up.weight", (64, 128)),
        ("token_embd.weight", (63, 64)),
        ("output_norm.weight", (65,)),
        ("blk.0.ffn_norm.weight", (64, 1)),
        ("blk.0.attn_k.weight", (2, 16, 64)),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name, shape, tmp_path):
    path = write_changed(tmp_path / "tiny.gguf", tensors={name: float_tensor(name, *shape)})
    expected = (
        rf"tensor {re.escape(name)} has shape {re.escape(str(shape))}; the model's metadata calls for \(\d+"
    )
    with pytest.raises(CheckpointError, match=expected):
        load(path)


@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_quantised_norm_is_refused_by_name(ggml_type, tmp_path):
    raw = bytes(quantise(torch.ones(1, 64), ggml_type).flatten().tolist())
    name = "blk.0.attn_norm.weight"
    path = write_changed(tmp_path / "tiny.gguf", tensors={name: Tensor(name, ggml_type, (64,), raw)})
    with pytest.raises(UnsupportedModel, match=rf"tensor {name} is {ggml_type}; supported: F32, F16, BF16"):
        load(path)


@pytest.mark.parametrize("ggml_type", ["F16", "BF16"])
def test_a_norm_of_half_the_width_is_widened(ggml_type, tmp_path):
    name = "output_norm.weight"
    raw = bytes(quantise(torch.full((1, 64), 1.5), ggml_type).flatten().tolist())
    path = write_changed(tmp_path / "tiny.gguf", tensors={name: Tensor(name, ggml_type, (64,), raw)})
    assert model_of(load(path)).norm.weight.tolist() == [1.5] * 64


@pytest.mark.parametrize("architecture", ["qwen1", "../llama", "", "Llama"])
def test_an_unknown_architecture_is_named_beside_those_there_are(architecture, tmp_path):
    path = write_changed(tmp_path / "tiny.gguf", metadata={"general.architecture": architecture})
    with pytest.raises(
        UnsupportedModel, match=rf"architecture '{re.escape(architecture)}' .*supported: .*llama"
    ):
        load(path)


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",
    ],
)
def test_a_missing_metadata_key_is_named(key, tmp_path):
    path = write_changed(tmp_path / "tiny.gguf", metadata={key: None})
    with pytest.raises(CheckpointError, match=f"metadata key '{key}' is missing"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", 7),
        ("llama.block_count", 0),
        ("llama.block_count", Typed("i32", -1)),
        ("llama.block_count", 1.5),
        ("llama.block_count", "two"),
        ("llama.block_count", True),
        ("llama.block_count", [1]),
        ("llama.context_length", 0),
        ("llama.context_length", 2**24 + 1),
        ("llama.embedding_length", 2**63),
        ("llama.feed_forward_length", 0),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.key_length", 15),
        ("llama.attention.key_length", 2**40),
        ("llama.rope.dimension_count", 8),
        ("llama.rope.freq_base", Typed("f32", float("nan"))),
        ("llama.rope.freq_base", Typed("f32", 0.0)),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.attention.layer_norm_rms_epsilon", Typed("f32", float("nan"))),
        ("llama.attention.layer_norm_rms_epsilon", Typed("f32", -1.0)),
        ("tokenizer.ggml.tokens", "abc"),
    ],
)
def test_an_impossible_metadata_value_is_refused_by_its_key(key, value, tmp_path):
    path = write_changed(tmp_path / "tiny.gguf", metadata={key: value})
    short = "key/value heads" if key.endswith("head_count_kv") and value == 3 else key
    short = "head width" if key in {"llama.attention.key_length", "llama.rope.dimension_count"} else short
    with pytest.raises(CheckpointError, match=f"({re.escape(short)}|{re.escape(key)})"):
        load(path)


def test_metadata_that_belongs_to_other_tensors_is_refused(tmp_path):
    """A sound value that lies: the tensors tell."""
    for key, value in (("llama.embedding_length", 96), ("llama.feed_forward_length", 160)):
        path = write_changed(tmp_path / "tiny.gguf", metadata={key: value})
        with pytest.raises(CheckpointError, match=r"tensor \S+ has shape"):
            load(path)
    path = write_changed(tmp_path / "tiny.gguf", metadata={"llama.block_count": 2})
    with pytest.raises(CheckpointError, match=r"tensors are missing: blk\.1"):
        load(path)


TIED_TYPES = ["Q8_0", "F16", "F32", "Q4_0", "Q4_1"]


@pytest.mark.parametrize("embedding_type", TIED_TYPES)
@pytest.mark.parametrize("numerics", ["stable", "reference"])
def test_a_file_without_an_output_tensor_shares_the_embeddings(embedding_type, numerics, tmp_path):
    """Whether the output's kernel has rows to read (then one copy serves both) or not (Q4: two)."""
    shape = TinyShape(vocab_size=64, num_layers=1, context=64, embedding_type=embedding_type)
    tied = write_tiny_llama(tmp_path / "tied.gguf", shape)
    embedding = tiny_tensors(shape)["token_embd.weight"]
    raw = bytes(embedding.raw.flatten().tolist())
    copy = Tensor("output.weight", embedding_type, (64, 64), raw)
    untied = write_changed(tmp_path / "untied.gguf", shape, tensors={"output.weight": copy})

    worker, apart = load(tied, numerics=numerics), load(untied, numerics=numerics)
    embed = model_of(worker).embed_tokens
    assert torch.equal(model_of(worker).lm_head(torch.eye(64)), model_of(apart).lm_head(torch.eye(64)))
    stored = model_of(apart).embed_tokens(torch.arange(64))
    assert torch.equal(stored, embedding.weight)
    # an embedding that reads the output's kernel is as exact as that kernel
    torch.testing.assert_close(
        embed(torch.arange(64)), stored, rtol=2.0**-8, atol=stored.abs().max().item() / 250
    )
    two_copies = numerics == "stable" and embedding_type.startswith("Q")
    assert bool(list(embed.buffers())) == two_copies
    saved = apart.info.packed_weight_bytes - worker.info.packed_weight_bytes
    assert saved == (0 if two_copies else len(raw))


def test_an_output_tensor_of_its_own_is_used(tmp_path):
    shape = TinyShape(vocab_size=64, num_layers=1, context=64, tied=False)
    worker = load(write_tiny_llama(tmp_path / "tiny.gguf", shape), numerics="reference")
    expected = tiny_tensors(shape)["output.weight"].weight
    torch.testing.assert_close(model_of(worker).lm_head(torch.eye(64)).T, expected)


def cache_files(folder: Path, kind: str = "packed") -> list[Path]:
    """Beside packed weights lies how they were calibrated, where a kernel is."""
    return sorted(folder.glob(f"*.{kind}")) if folder.is_dir() else []


CACHED_SHAPES = {
    "tied, one copy": SHAPE,
    "tied, two copies": TinyShape(
        vocab_size=64, num_layers=1, context=64, linear_type="Q4_0", embedding_type="Q4_0"
    ),
    "untied, floats": TinyShape(vocab_size=64, num_layers=1, context=64, embedding_type="F16", tied=False),
}


@pytest.mark.parametrize("name", CACHED_SHAPES)
@pytest.mark.parametrize("numerics", ["stable", "reference"])
def test_a_second_load_maps_the_cache_file_and_gives_the_same_bits(name, numerics, tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", CACHED_SHAPES[name])
    elsewhere = load(path, cache_dir=tmp_path / "elsewhere", numerics=numerics)
    expected = logits(elsewhere)
    first = load(path, cache_dir=tmp_path / "cache", numerics=numerics)
    assert torch.equal(logits(first), expected)
    is_calibrated = bool(cache_files(tmp_path / "cache", "calibration"))
    assert is_calibrated == (numerics == "stable" and name != "untied, floats")
    if not is_calibrated:
        assert torch.equal(logits(load(path, numerics=numerics)), expected)
    (file,) = cache_files(tmp_path / "cache")
    before = file.stat()
    second = load(path, cache_dir=tmp_path / "cache", numerics=numerics)
    assert torch.equal(logits(second), expected)
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "it was written again"
    sizes = {worker.info.packed_weight_bytes for worker in (first, second, elsewhere)}
    assert len(sizes) == 1


def test_numerics_have_cache_files_of_their_own(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", SHAPE)
    load(path, cache_dir=tmp_path / "cache")
    load(path, cache_dir=tmp_path / "cache", numerics="reference")
    assert len(cache_files(tmp_path / "cache")) == 2


def injure(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    match how:
        case "cut":
            del data[-4096:]
        case "cut inside the header":
            del data[40:]
        case "emptied":
            data.clear()
        case "a flipped bit in the tensors":
            data[len(data) // 2] ^= 4
        case "a flipped bit in the header":
            data[60] ^= 1
        case "another version":
            data[7] += 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "how",
    [
        "cut",
        "cut inside the header",
        "emptied",
        "a flipped bit in the tensors",
        "a flipped bit in the header",
        "another version",
    ],
)
def test_a_damaged_cache_file_is_as_good_as_none_and_is_replaced(how, tmp_path):
    path, cache = write_tiny_llama(tmp_path / "tiny.gguf", SHAPE), tmp_path / "cache"
    expected = logits(load(path, cache_dir=cache))
    (file,) = cache_files(cache)
    sound = file.read_bytes()
    injure(file, how)
    assert file.read_bytes() != sound
    assert torch.equal(logits(load(path, cache_dir=cache)), expected)
    assert cache_files(cache) == [file]
    assert file.read_bytes() == sound


@pytest.mark.parametrize("how", ["cut", "emptied", "a flipped bit in the header", "removed"])
def test_a_damaged_calibration_is_found_again_and_comes_out_the_same(how, tmp_path):
    """Tokens may not change because a file did: the sample is the same every time."""
    path, cache = write_tiny_llama(tmp_path / "tiny.gguf", SHAPE), tmp_path / "cache"
    expected = logits(load(path, cache_dir=cache))
    (file,) = cache_files(cache, "calibration")
    sound = file.read_bytes()
    if how == "removed":
        file.unlink()
    else:
        injure(file, how)
    assert torch.equal(logits(load(path, cache_dir=cache)), expected)
    assert file.read_bytes() == sound
    assert len(cache_files(cache)) == 1, "what was packed fits the same calibration"


def test_another_models_cache_file_under_our_name_is_not_used(tmp_path):
    cache = tmp_path / "cache"
    path, other = (write_tiny_llama(tmp_path / f"{seed}.gguf", SHAPE, seed=seed) for seed in (0, 1))
    expected = logits(load(path, cache_dir=tmp_path / "elsewhere"))
    load(other, cache_dir=cache)
    (theirs,) = cache_files(cache)
    load(path, cache_dir=cache)
    (ours,) = set(cache_files(cache)) - {theirs}
    ours.write_bytes(theirs.read_bytes())
    assert torch.equal(logits(load(path, cache_dir=cache)), expected)


@pytest.mark.parametrize("where", ["below a file", "a file", "on no disk"])
def test_a_cache_folder_that_cannot_be_written_does_not_matter(where, tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", SHAPE)
    (tmp_path / "occupied").write_text("here")
    folder = {
        "below a file": tmp_path / "occupied" / "cache",
        "a file": tmp_path / "occupied",
        "on no disk": Path("/proc/self/cache"),
    }[where]
    expected = logits(load(path, cache_dir=tmp_path / "cache"))
    assert torch.equal(logits(load(path, cache_dir=folder)), expected)
    assert (tmp_path / "occupied").read_text() == "here"


def test_a_changed_model_file_gets_a_cache_file_of_its_own(tmp_path):
    """Same metadata, same size, other weights: the time of the last change tells."""
    path, cache = write_tiny_llama(tmp_path / "tiny.gguf", SHAPE), tmp_path / "cache"
    before = logits(load(path, cache_dir=cache))
    size = path.stat().st_size
    write_tiny_llama(path, SHAPE, seed=9)
    later = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(later, later))
    assert path.stat().st_size == size
    after = logits(load(path, cache_dir=cache))
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(load(path, cache_dir=tmp_path / "elsewhere")))
    assert len(cache_files(cache)) == 2
    assert len(cache_files(cache, "calibration")) == 2


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("how", ["truncated", "deleted"])
@pytest.mark.parametrize("types", [("F32", "F32"), ("Q4_1", "Q8_0"), ("Q8_0", "Q4_0")])
def test_what_happens_to_the_model_file_after_loading_does_not_matter(cached, how, types, tmp_path):
    """Touching a page of a file that has shrunk would end the process."""
    linear_type, embedding_type = types
    shape = TinyShape(vocab_size=64, num_layers=1, linear_type=linear_type, embedding_type=embedding_type)
    path = write_tiny_llama(tmp_path / "tiny.gguf", shape)
    worker = load(path, cache_dir=tmp_path / "cache" if cached else "")
    expected = logits(load(path, cache_dir=tmp_path / "elsewhere" if cached else ""))
    if how == "truncated":
        os.truncate(path, 0)
    else:
        path.unlink()
    assert torch.equal(logits(worker), expected)
