"""Safetensors files that lie: each lie is refused by name, and mutants never crash, hang or allocate much."""

import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from core.errors import CheckpointError, UnsupportedModel
from core.weights import open_checkpoint, open_safetensors, read_checkpoint_metadata
from core.weights.json_file import MOST_CONFIG_BYTES
from core.weights.safetensors_header import MOST_HEADER_BYTES
from tests.core.weights.test_gguf_mutations import SLACK_BYTES, mutant
from tests.fakes.safetensors_files import safetensors_bytes

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "BF16", "shape": [], "data_offsets": [32, 34]},
    "d": {"dtype": "F32", "shape": [0, 7], "data_offsets": [34, 34]},
}
DATA = bytes(range(34))


def write(folder: Path, content: bytes) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(content)
    return folder


def changed(**entries: Any) -> dict[str, Any]:
    return {**HEADER, **entries}


def entry(dtype: Any = "F32", shape: Any = (2, 3), data_offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def test_a_sound_file_is_read_without_its_data(tmp_path):
    checkpoint = open_checkpoint(str(write(tmp_path, safetensors_bytes(HEADER, DATA))))
    assert (checkpoint.format, checkpoint.architecture) == ("safetensors", "llama")
    assert {name: (t.ggml_type, t.shape, t.nbytes) for name, t in checkpoint.tensors.items()} == {
        "a": ("F32", (2, 3), 24), "b": ("F16", (4,), 8), "c": ("BF16", (), 2), "d": ("F32", (0, 7), 0),
    }  # fmt: skip
    assert bytes(checkpoint.raw("b")) == DATA[24:32]
    with pytest.raises(CheckpointError, match="there is no tensor 'x'"):
        checkpoint.raw("x")
    checkpoint.close()
    assert read_checkpoint_metadata(str(tmp_path)) == {"model_type": "llama"}


SOUND = json.dumps(HEADER).encode()
LIES: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"1234567", "has 7 bytes and its header's length alone takes 8"),
    (safetensors_bytes(HEADER, DATA, length=2**64 - 1), "length 18446744073709551615 at offset 0"),
    (safetensors_bytes(HEADER, DATA, length=2**63), "length 9223372036854775808 at offset 0"),
    (safetensors_bytes(b"[]", b""), r'header starts with "\[\]" and should start with "\{"'),
    (safetensors_bytes(b"", DATA), 'header starts with "" and'),
    (safetensors_bytes(b" " + SOUND, DATA), 'header starts with " {'),
    (safetensors_bytes(b'{"a": ' + b"[" * 100_000, b""), "the header is nested too deeply"),
    (safetensors_bytes(b'{"a": 1, "a": 2}', b""), "the header has the key 'a' twice"),
    (safetensors_bytes(b'{"a": {"dtype": "F32", "dtype": "F16"}}', b""), "key 'dtype' twice"),
    (safetensors_bytes(b'{"a": NaN}', b""), "the header holds NaN"),
    (safetensors_bytes(b'{"a": \xff}', b""), "the header is not UTF-8 at byte 6"),
    (safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}", b""), "the header is not JSON"),
    (safetensors_bytes(SOUND + b"x", DATA), "the header is not JSON"),
    (safetensors_bytes(changed(__metadata__={"a": 1}), DATA), "__metadata__ in the header is not"),
    (safetensors_bytes(changed(a=5), DATA), "tensor 'a' is not described by"),
    (safetensors_bytes(changed(a={**entry(), "extra": 1}), DATA), "tensor 'a' is not described by"),
    (safetensors_bytes(changed(a=entry(dtype="Q4")), DATA), "dtype 'Q4', which the format does not know"),
    (safetensors_bytes(changed(a=entry(dtype=["F32"])), DATA), r"dtype \['F32'\], which"),
    (safetensors_bytes(changed(a=entry(shape=6)), DATA), "shape of tensor 'a' is 6"),
    (safetensors_bytes(changed(a=entry(shape=[2.0, 3])), DATA), "shape of tensor 'a' is"),
    (safetensors_bytes(changed(a=entry(shape=[True, 6])), DATA), "shape of tensor 'a' is"),
    (safetensors_bytes(changed(a=entry(shape=[-2, -3])), DATA), "holds -2; sizes are 0 to"),
    (safetensors_bytes(changed(a=entry(shape=[2**64, 0])), DATA), "holds 18446744073709551616"),
    (safetensors_bytes(changed(a=entry(shape=[2**42 + 1, 2**22])), DATA), "has 24 bytes; F32 of shape"),
    (safetensors_bytes(changed(a=entry(shape=[1] * 9)), DATA), "has 9 dimensions"),
    (safetensors_bytes(changed(a=entry(shape=[2, 2])), DATA), "needs 16"),
    (safetensors_bytes(changed(a=entry(data_offsets=[24, 0])), DATA), "not begin and end"),
    (safetensors_bytes(changed(a=entry(data_offsets=[0, 24, 24])), DATA), "not begin and end"),
    (safetensors_bytes(changed(a=entry(data_offsets=[0, 2**63])), DATA), "data byte 9223372036854775808"),
    (safetensors_bytes(changed(b=entry("F16", [4], [20, 28])), DATA), "'b' begins .* and overlaps 'a'"),
    (safetensors_bytes(changed(c=entry("BF16", [1], [0, 2])), DATA), "overlaps"),
    (safetensors_bytes({key: HEADER[key] for key in "ac"}, DATA), "leaves a hole after 'a'"),
    (safetensors_bytes({"b": entry("F16", [4], [24, 32])}, DATA), "leaves a hole after 'the header'"),
    (safetensors_bytes(HEADER, DATA + b"x"), "has bytes that belong to no tensor"),
    (safetensors_bytes({}, b"x"), "has bytes that belong to no tensor"),
    (safetensors_bytes(HEADER, DATA[:-1]), "tensor 'c' ends at data byte 34; there are 33"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "said"), LIES, ids=[said for _, said in LIES])
def test_a_lie_is_refused_by_name(content, said, tmp_path):
    with pytest.raises(CheckpointError, match=said) as refusal:
        open_safetensors(str(write(tmp_path, content)))
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("dtype", ["F64", "I64", "F8_E4M3", "BOOL"])
def test_a_type_without_a_kernel_is_refused_by_its_name(dtype, tmp_path):
    content = safetensors_bytes(changed(a=entry(dtype=dtype)), DATA)
    with pytest.raises(UnsupportedModel, match=f"tensor 'a' is {dtype}; supported: F32, F16, BF16"):
        open_safetensors(str(write(tmp_path, content)))


def test_a_header_over_the_limit_is_refused_before_it_is_read(tmp_path):
    path = write(tmp_path, (MOST_HEADER_BYTES + 1).to_bytes(8, "little")) / "model.safetensors"
    os.truncate(path, MOST_HEADER_BYTES + 100)  # a hole: no disk is used
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"over the limit of {MOST_HEADER_BYTES} bytes"):
            open_safetensors(str(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < SLACK_BYTES
    finally:
        tracemalloc.stop()


def test_a_config_over_the_limit_and_one_that_is_a_folder_are_refused(tmp_path):
    write(tmp_path, safetensors_bytes(HEADER, DATA))
    os.truncate(tmp_path / "config.json", MOST_CONFIG_BYTES + 1)
    with pytest.raises(CheckpointError, match=rf"config\.json: has {MOST_CONFIG_BYTES + 1} bytes"):
        open_safetensors(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        open_safetensors(str(tmp_path))
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        open_safetensors(str(tmp_path))


def sharded(folder: Path, weight_map: Any) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    one = {"a": entry()}
    other = {"b": entry("F16", [4], [0, 8])}
    (folder / "one.safetensors").write_bytes(safetensors_bytes(one, DATA[:24]))
    (folder / "two.safetensors").write_bytes(safetensors_bytes(other, DATA[24:32]))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 32, "made by": "hand, for a test"}, "weight_map": weight_map})
    )
    return folder


SOUND_MAP = {"a": "one.safetensors", "b": "two.safetensors"}


def test_shards_are_one_checkpoint(tmp_path):
    checkpoint = open_safetensors(str(sharded(tmp_path, SOUND_MAP)))
    assert bytes(checkpoint.raw("b")) == DATA[24:32]
    assert [Path(path).name for path in checkpoint.files] == [
        "config.json",
        "one.safetensors",
        "two.safetensors",
    ]
    checkpoint.close()


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        (None, "'weight_map' is missing, empty or no object"),
        ({}, "'weight_map' is missing, empty or no object"),
        (["a"], "'weight_map' is missing, empty or no object"),
        ({**SOUND_MAP, "a": 3}, "tensor 'a' lies in 3"),
        ({**SOUND_MAP, "a": "../one.safetensors"}, "which is no .safetensors file name"),
        ({**SOUND_MAP, "a": "/etc/passwd"}, "which is no .safetensors file name"),
        ({**SOUND_MAP, "a": "one.bin"}, "which is no .safetensors file name"),
        ({**SOUND_MAP, "c": "three.safetensors"}, r"three\.safetensors: is missing: .* keeps 1 tensors"),
        ({**SOUND_MAP, "c": "two.safetensors"}, "'c' is in two.safetensors by the index and in no file"),
        ({**SOUND_MAP, "a": "two.safetensors"}, r"'a' is in two\.safetensors by the index and in no file"),
        ({"a": "one.safetensors", "x": "two.safetensors"}, "'b' is in no file by the index and in two"),
    ],
)
def test_an_index_that_lies_is_refused_by_name(weight_map, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        open_safetensors(str(sharded(tmp_path, weight_map)))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = sharded(tmp_path, SOUND_MAP)
    (folder / "two.safetensors").write_bytes((folder / "one.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"tensor 'a' stands in .*one\.safetensors too"):
        open_safetensors(str(folder))


def survives(folder: Path) -> bool:
    """Whether the folder was read; anything but `CheckpointError` or a sound result fails the test."""
    try:
        checkpoint = open_safetensors(str(folder))
    except CheckpointError as error:
        assert error.problem
        return False
    for name, info in checkpoint.tensors.items():
        assert info.offset + info.nbytes <= Path(checkpoint.files[1 + info.file]).stat().st_size
        assert len(checkpoint.raw(name)) == info.nbytes
        checkpoint.drop_pages(name)
    checkpoint.close()
    return True


@pytest.mark.parametrize(
    ("name", "num_mutants"),
    [("one.safetensors", 2_000), ("model.safetensors.index.json", 500), ("config.json", 500)],
)
def test_a_damaged_file_is_refused_or_read_and_never_allocates_beyond_its_size(
    name, num_mutants, tmp_path, search_factor
):
    path = sharded(tmp_path, SOUND_MAP) / name
    data = path.read_bytes()
    assert survives(tmp_path)
    rng = random.Random(20261130)
    num_read = 0
    tracemalloc.start()
    try:
        for index in range(num_mutants * search_factor):
            damaged = mutant(data, rng)
            with path.open("r+b") as file:
                file.write(damaged)
                file.truncate()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            num_read += survives(tmp_path)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= len(damaged) + SLACK_BYTES, f"mutant {index} allocated {peak} bytes"
    finally:
        tracemalloc.stop()
    assert 0 < num_read < num_mutants * search_factor, "mutants of both kinds"


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    content = safetensors_bytes(HEADER, DATA)
    for length in range(len(content)):
        assert not survives(write(tmp_path, content[:length])), f"cut after {length} bytes"
