"""Reading sound GGUF files, and refusing each kind of unsound one by name."""

import mmap
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.errors import CheckpointError, UnsupportedModel
from core.weights import open_gguf, read_checkpoint_metadata
from tests.fakes.gguf_writer import Tensor, Typed, encode_string, gguf_bytes, random_tensor, write_gguf

EMPTY = struct.pack("<IQQ", 3, 0, 0)
Q8_ROW = random_tensor("t", "Q8_0", (1, 32), rng=random.Random(1))


def header(*, num_tensors: int = 0, num_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return encode_string(key) + struct.pack("<I", kind) + payload


def description(name: str, dims: tuple[int, ...], *, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return encode_string(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def problem_of(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(str(path))
    assert caught.value.path == str(path)
    assert "\n" not in str(caught.value)
    return caught.value.problem


def test_every_kind_of_metadata_comes_back_as_it_was_written(small_file, small_metadata):
    expected = {
        key: value.value if isinstance(value, Typed) else value for key, value in small_metadata.items()
    }
    checkpoint = open_gguf(str(small_file))
    assert checkpoint.metadata == expected
    assert checkpoint.metadata["small.yes"] is True
    assert read_checkpoint_metadata(str(small_file)) == expected
    checkpoint.close()


def test_every_tensor_comes_back_with_its_type_its_torch_shape_and_its_bytes(small_file, small_tensors):
    checkpoint = open_gguf(str(small_file))
    assert list(checkpoint.tensors) == [tensor.name for tensor in small_tensors]
    for tensor in small_tensors:
        info = checkpoint.tensors[tensor.name]
        assert (info.ggml_type, info.shape, info.nbytes) == (tensor.ggml_type, tensor.shape, len(tensor.data))
        assert info.offset % 64 == 0
        assert checkpoint.raw(tensor.name) == tensor.data
        assert checkpoint.raw(tensor.name).readonly
    assert checkpoint.tensors["brain.weight"].num_elements == 20
    checkpoint.close()


def test_version_2_is_read_like_version_3(tmp_path, small_tensors):
    path = write_gguf(tmp_path / "v2.gguf", {"a": 1}, tensors=small_tensors, version=2)
    checkpoint = open_gguf(str(path))
    assert checkpoint.metadata == {"a": 1}
    assert checkpoint.raw("q4_1.weight") == small_tensors[4].data
    checkpoint.close()


def test_a_file_without_tensors_is_sound(tmp_path):
    checkpoint = open_gguf(str(write_gguf(tmp_path / "vocabulary.gguf", {"a": "b"})))
    assert checkpoint.tensors == {}
    checkpoint.close()


def test_a_view_outlives_the_checkpoint_it_came_from(small_file, small_tensors):
    checkpoint = open_gguf(str(small_file))
    view = checkpoint.raw("q8_0.weight")
    checkpoint.close()
    assert view == small_tensors[5].data


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
def test_no_descriptor_stays_open(small_file):
    before = len(list(Path("/proc/self/fd").iterdir()))
    checkpoint = open_gguf(str(small_file))
    view = checkpoint.raw("norm.weight")
    checkpoint.close()
    view.release()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_unknown_tensor_is_refused_by_name(small_file):
    checkpoint = open_gguf(str(small_file))
    with pytest.raises(CheckpointError, match="there is no tensor 'nope' among its 6"):
        checkpoint.raw("nope")
    with pytest.raises(CheckpointError, match="there is no tensor 'nope'"):
        checkpoint.drop_pages("nope")
    checkpoint.close()


def mapped_file_bytes(path: Path) -> int:
    """Resident bytes of `path`'s mappings in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_dropped_pages_leave_the_resident_set_and_can_be_read_again(tmp_path):
    data = random.Random(3).randbytes(4 << 20)
    tensors = [Tensor("a", "F32", (1 << 20,), data), Tensor("b", "F32", (1 << 20,), data[::-1])]
    path = write_gguf(tmp_path / "big.gguf", {}, tensors=tensors)
    checkpoint = open_gguf(str(path))
    assert mapped_file_bytes(path) <= 256 * 1024
    assert bytes(checkpoint.raw("a")) == data
    assert mapped_file_bytes(path) >= 4 << 20
    checkpoint.drop_pages("a")
    assert mapped_file_bytes(path) <= 256 * 1024
    assert bytes(checkpoint.raw("a")) == data
    assert bytes(checkpoint.raw("b")) == data[::-1]
    checkpoint.drop_pages("b")
    checkpoint.drop_pages("a")
    checkpoint.close()


def test_the_metadata_of_a_large_vocabulary_is_read_quickly(tmp_path):
    tokens = [f"token{index}" for index in range(256_000)]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": Typed("f32", [0.0] * len(tokens))}
    path = write_gguf(tmp_path / "large.gguf", metadata)
    start = time.process_time()
    read = read_checkpoint_metadata(str(path))
    assert read["tokenizer.ggml.tokens"] == tokens
    assert time.process_time() - start < 2.0  # 0.15 s on an ordinary machine


def test_the_reader_leaves_torch_alone():
    code = "import sys, core.weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_file_is_said_in_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"nope\.gguf: there is no such file"):
        open_gguf(str(tmp_path / "nope.gguf"))


def test_a_directory_is_said_in_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="is a directory"):
        open_gguf(str(tmp_path))


def test_an_empty_file_is_said_in_one_line(tmp_path):
    assert "is empty" in problem_of(tmp_path, b"")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint_metadata(str(tmp_path / "pipe.gguf"))


def test_a_path_with_a_null_byte_is_refused():
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_gguf("a\0b")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_said_in_one_line(small_file):
    small_file.chmod(0)
    with pytest.raises(CheckpointError, match="cannot be opened: Permission denied"):
        open_gguf(str(small_file))


UNSOUND = {
    "magic": (
        b"PK\3\4" + EMPTY,
        'is not a GGUF file: it starts with the bytes 50 4b 03 04 and should start with "GGUF"',
    ),
    "text": (
        b"Once upon a time" + EMPTY,
        'it starts with "Once" and should start with "GGUF"; give the path',
    ),
    "short magic": (b"GG", "is not a GGUF file"),
    "tensor count": (header(num_tensors=2**64 - 1), f"tensor count {2**64 - 1} at offset 24 needs"),
    "metadata count": (header(num_entries=2**63), f"metadata count {2**63} at offset 24 needs"),
    "empty key": (
        header(num_entries=1) + entry("", 4, bytes(40)),
        "key of metadata entry 0 at offset 24 is empty",
    ),
    "key length": (
        header(num_entries=1) + struct.pack("<Q", 2**40) + bytes(40),
        f"key of metadata entry 0 at offset 24 has {2**40} bytes; at most 65535 are allowed",
    ),
    "key encoding": (
        header(num_entries=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40),
        "key of metadata entry 0 at offset 32 is not UTF-8",
    ),
    "twice the same key": (
        header(num_entries=2) + entry("k", 4, bytes(4)) * 2,
        "metadata key 'k' at offset 41 stands there twice",
    ),
    "value type": (header(num_entries=1) + entry("k", 13, bytes(8)), "'k' at offset 37 has value type 13"),
    "string length": (
        header(num_entries=1) + entry("k", 8, struct.pack("<Q", 2**62)),
        f"k at offset 45 needs {2**62} bytes, but 0 are left of the file's 45",
    ),
    "string encoding": (
        header(num_entries=1) + entry("k", 8, struct.pack("<Q", 1) + b"\x80"),
        "k at offset 45 is not UTF-8",
    ),
    "truth value": (header(num_entries=1) + entry("k", 7, b"\2"), "neither 0 nor 1"),
    "array length": (
        header(num_entries=1) + entry("k", 9, struct.pack("<IQ", 5, 2**61) + bytes(8)),
        f"'k', an array of {2**61} elements, at offset 49 needs {2**63} bytes, but 8 are left",
    ),
    "string array length": (
        header(num_entries=1) + entry("k", 9, struct.pack("<IQ", 8, 2**60)),
        f"an array of {2**60} elements, at offset 49 needs {2**63} bytes",
    ),
    "element type": (header(num_entries=1) + entry("k", 9, struct.pack("<IQ", 99, 1)), "has element type 99"),
    "array string length": (
        header(num_entries=1) + entry("k", 9, struct.pack("<IQQ", 8, 1, 50)),
        "element 0 of 'k' at offset 57 needs 50 bytes, but 0 are left",
    ),
    "array string encoding": (
        header(num_entries=1) + entry("k", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xc3"),
        "element 0 of 'k' at offset 57 is not UTF-8",
    ),
    "array truth value": (
        header(num_entries=1) + entry("k", 9, struct.pack("<IQ", 7, 2) + b"\1\3"),
        "neither 0 nor 1",
    ),
    "nesting": (
        header(num_entries=1) + entry("k", 9, struct.pack("<IQ", 9, 1) * 4 + struct.pack("<IQ", 4, 0)),
        "nests arrays more than 4 deep",
    ),
    "alignment type": (gguf_bytes({"general.alignment": Typed("i32", 32)}), "has value type 5; it must be 4"),
    "alignment value": (
        gguf_bytes({"general.alignment": 48}),
        "is 48; it must be a power of two from 8 to 65536",
    ),
    "alignment zero": (gguf_bytes({"general.alignment": 0}), "is 0; it must be a power of two"),
    "alignment high": (gguf_bytes({"general.alignment": 1 << 17}), "is 131072; it must be a power of two"),
    "empty tensor name": (
        header(num_tensors=1) + description("", (4,)) + bytes(64),
        "name of tensor 0 at offset 24 is empty",
    ),
    "tensor name length": (
        header(num_tensors=1) + description("n" * 1025, (4,)) + bytes(64),
        "has 1025 bytes; at most 1024 are allowed",
    ),
    "no dimension": (
        header(num_tensors=1) + description("t", ()) + bytes(64),
        "has 0 dimensions; 1 to 4 are allowed",
    ),
    "five dimensions": (header(num_tensors=1) + description("t", (1,) * 5) + bytes(64), "has 5 dimensions"),
    "empty dimension": (
        header(num_tensors=1) + description("t", (4, 0)) + bytes(64),
        "each must be at least 1",
    ),
    "dimension product": (
        header(num_tensors=1) + description("t", (2**63, 2**63, 2**63, 2**63)) + bytes(64),
        f"needs bytes 96 to {96 + 4 * 2**252}, but the file has",
    ),
    "row length": (
        header(num_tensors=1) + description("t", (33,), kind=8) + bytes(64),
        "has rows of 33 elements; type Q8_0 needs a multiple of 32",
    ),
    "tensor offset alignment": (
        header(num_tensors=1) + description("t", (1,), offset=4) + bytes(64),
        "starts at 68, which is no multiple of 32",
    ),
    "tensor offset": (
        header(num_tensors=1) + description("t", (1,), offset=2**64 - 32) + bytes(64),
        "it is truncated or damaged; download or copy it again",
    ),
    "overlap": (
        header(num_tensors=2) + description("a", (16,)) + description("b", (16,), offset=32) + bytes(256),
        "starts at 128, inside tensor 'a', which ends at 160",
    ),
    "twice the same tensor": (
        header(num_tensors=2) + description("a", (1,)) + description("a", (1,), offset=32) + bytes(256),
        "tensor name 'a' at offset 57 stands there twice",
    ),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_an_unsound_file_is_refused_with_field_offset_and_sizes(tmp_path, case):
    data, expected = UNSOUND[case]
    assert expected in problem_of(tmp_path, data)


UNSUPPORTED = {
    "version 1": (header(version=1), "is GGUF version 1; supported: 2, 3"),
    "version 4": (header(version=4), "is GGUF version 4"),
    "big-endian": (header(version=3 << 24), "big-endian GGUF file (version 3)"),
    "Q4_K": (
        header(num_tensors=1) + description("blk.0.attn_q.weight", (256,), kind=12) + bytes(256),
        (
            "type Q4_K of tensor 'blk.0.attn_q.weight' at offset 63 is not supported; "
            "supported: F32, F16, Q4_0, Q4_1, Q8_0, BF16"
        ),
    ),
    "Q6_K": (
        header(num_tensors=1) + description("t", (256,), kind=14) + bytes(256),
        "type Q6_K of tensor 't'",
    ),
    "unknown": (
        header(num_tensors=1) + description("t", (256,), kind=777) + bytes(256),
        "type number 777 of tensor",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_built_is_refused_by_name(tmp_path, case):
    data, expected = UNSUPPORTED[case]
    path = tmp_path / "unsupported.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel) as caught:
        open_gguf(str(path))
    assert expected in caught.value.problem


def test_tensors_may_stand_in_any_order_with_gaps_between(tmp_path):
    described = description("late", (2,), offset=128) + description("early", (2,))
    data = header(num_tensors=2) + described
    data += bytes(-len(data) % 32) + struct.pack("<2f", 1, 2) + bytes(120) + struct.pack("<2f", 3, 4)
    path = tmp_path / "gaps.gguf"
    path.write_bytes(data)
    checkpoint = open_gguf(str(path))
    assert struct.unpack("<2f", checkpoint.raw("late")) == (3.0, 4.0)
    assert struct.unpack("<2f", checkpoint.raw("early")) == (1.0, 2.0)
    checkpoint.close()


def test_a_page_is_what_the_system_says(small_file):
    # drop_pages rounds to pages; a last, partial page must not be asked for beyond the file.
    assert small_file.stat().st_size % mmap.PAGESIZE != 0
    checkpoint = open_gguf(str(small_file))
    for name in checkpoint.tensors:
        checkpoint.drop_pages(name)
    checkpoint.close()
