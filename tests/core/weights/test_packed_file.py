"""The cache file of packed weights: what is written comes back, and anything else is as good as none."""

import random
from pathlib import Path

import pytest
import torch

from core.weights.packed_file import ALIGNMENT, load_packed, save_packed


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "layers.0.packed": torch.randint(0, 255, (64, 48), dtype=torch.uint8, generator=generator),
        "layers.0.scales": torch.randn(2, 64, 2, generator=generator).bfloat16(),
        "lm_head.weight": torch.randint(-127, 127, (70, 70), dtype=torch.int8, generator=generator),
        "norm": torch.randn(5, generator=generator),
        "one": torch.tensor([1.5]),
    }


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "weights.packed"
    assert save_packed(path, "key", some_tensors())
    return path


def test_tensors_come_back_as_they_were(sound):
    loaded = load_packed(sound, "key")
    assert loaded is not None
    assert loaded.keys() == some_tensors().keys()
    for name, tensor in some_tensors().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].data_ptr() % 64 == 0, "kernels read whole cache lines"
    assert sound.stat().st_size % ALIGNMENT == 0


def test_nothing_but_the_file_is_left_in_its_folder(sound):
    assert [file.name for file in sound.parent.iterdir()] == ["weights.packed"]


def test_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "weights.packed"
    assert save_packed(path, "key", some_tensors())
    assert load_packed(path, "key") is not None


@pytest.mark.parametrize("key", ["", "ke", "key2", "KEY"])
def test_a_file_of_another_key_is_not_used(key, sound):
    assert load_packed(sound, key) is None


def test_a_file_that_is_not_there_or_a_folder_is_not_used(tmp_path):
    assert load_packed(tmp_path / "absent", "key") is None
    assert load_packed(tmp_path, "key") is None


def test_a_file_cut_anywhere_is_not_used(sound):
    data = sound.read_bytes()
    rng = random.Random(1)
    for size in (
        0,
        1,
        8,
        15,
        16,
        17,
        ALIGNMENT,
        len(data) - 1,
        *(rng.randrange(len(data)) for _ in range(40)),
    ):
        sound.write_bytes(data[:size])
        assert load_packed(sound, "key") is None, size
    sound.write_bytes(data + b"\0")
    assert load_packed(sound, "key") is None


def test_a_flipped_bit_in_the_header_or_a_tensor_is_noticed(sound):
    """Every bit of the header; random ones of the tensors. Padding alone may be anything."""
    data = bytearray(sound.read_bytes())
    header = 16 + int.from_bytes(data[8:12], "little")
    first = -(-header // ALIGNMENT) * ALIGNMENT
    rng = random.Random(2)
    places = [(at, bit) for at in range(header) for bit in range(8)]
    places += [(first + rng.randrange(64 * 48), rng.randrange(8)) for _ in range(100)]
    for at, bit in places:
        with sound.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ (1 << bit)]))
            file.flush()
            assert load_packed(sound, "key") is None, (at, bit)
            file.seek(at)
            file.write(bytes([data[at]]))
    assert load_packed(sound, "key") is not None


def test_a_header_as_long_as_it_likes_is_not_read(sound):
    data = bytearray(sound.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    sound.write_bytes(data)
    assert load_packed(sound, "key") is None


def test_where_nothing_can_be_written_saving_says_so_and_leaves_nothing(tmp_path):
    occupied = tmp_path / "occupied"
    occupied.write_text("here")
    assert not save_packed(occupied / "weights.packed", "key", some_tensors())
    (tmp_path / "folder.packed").mkdir()
    (tmp_path / "folder.packed" / "inside").write_text("")
    assert not save_packed(tmp_path / "folder.packed", "key", some_tensors())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder.packed", "occupied"]


def test_a_mapping_outlives_the_file_that_replaces_it(sound):
    loaded = load_packed(sound, "key")
    assert loaded is not None
    changed = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
    assert save_packed(sound, "key", changed)
    for name, tensor in some_tensors().items():
        assert torch.equal(loaded[name], tensor)
    sound.unlink()
    assert torch.equal(loaded["one"], torch.tensor([1.5]))


def test_a_file_without_tensors_is_sound(tmp_path):
    path = tmp_path / "empty.packed"
    assert save_packed(path, "key", {})
    assert load_packed(path, "key") == {}
