"""Damaged files: whatever happens to the bytes, the reader refuses by name or reads something sound."""

import random
import tracemalloc
from pathlib import Path

from core.errors import CheckpointError
from core.weights import open_gguf

SLACK_BYTES = 256 * 1024
"""Room for the parsed values of a sound small file, tracing included."""
BOLD_NUMBERS = (0, 1, 7, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def check(path: Path, data: bytes) -> bool:
    """Return whether `data` was read; anything but `CheckpointError` or a sound result fails the test."""
    with path.open("r+b") as file:  # in place: emptying a file first makes some systems flush it
        file.write(data)
        file.truncate()
    try:
        checkpoint = open_gguf(str(path))
    except CheckpointError as error:
        assert error.problem
        return False
    for info in checkpoint.tensors.values():
        assert info.offset + info.nbytes <= len(data)
        assert len(checkpoint.raw(info.name)) == info.nbytes
        checkpoint.drop_pages(info.name)
    checkpoint.close()
    return True


def mutant(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one to four injuries, most of them in the header."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(result), 1400) if rng.random() < 0.9 else len(result))
        match rng.randrange(6):
            case 0:
                result[at] ^= 1 << rng.randrange(8)
            case 1:
                result[at] = rng.randrange(256)
            case 2:
                width = rng.choice((4, 8))
                number = rng.choice(BOLD_NUMBERS) % (1 << (8 * width))
                result[at : at + width] = number.to_bytes(width, "little")
            case 3:
                del result[at : at + rng.randint(1, 16)]
            case 4:
                result[at:at] = rng.randbytes(rng.randint(1, 16))
            case _:
                other = rng.randrange(len(result))
                result[at : at + 8] = result[other : other + 8]
        if not result:
            return bytes(result)
    return bytes(result)


def test_a_file_cut_at_any_byte_is_refused(small_file):
    data = small_file.read_bytes()
    assert check(small_file, data)
    for length in range(len(data)):
        assert not check(small_file, data[:length]), f"cut after {length} bytes"


def test_a_damaged_file_is_refused_or_read_and_never_allocates_beyond_its_size(small_file, search_factor):
    data = small_file.read_bytes()
    rng = random.Random(20261130)
    num_mutants = 2_000 * search_factor
    num_read = 0
    tracemalloc.start()
    try:
        for index in range(num_mutants):
            damaged = mutant(data, rng)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            num_read += check(small_file, damaged)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= len(damaged) + SLACK_BYTES, f"mutant {index} allocated {peak} bytes"
    finally:
        tracemalloc.stop()
    assert 0 < num_read < num_mutants / 2, "mutants of both kinds"
