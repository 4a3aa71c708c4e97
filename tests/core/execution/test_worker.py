"""The real worker's options: device, pool size, defaults, and what it tells about itself."""

import msgspec
import pytest
import torch

from core.attention.kv_storage import kv_bytes_per_token
from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError
from core.execution.worker import load_worker, pick_device
from tests.fakes.plans import planned, step
from tests.fakes.tiny_llama import TinyShape, write_tiny_llama
from tests.gpu.devices import ON_EVERY_DEVICE

SHAPE = TinyShape(vocab_size=64, num_layers=2, context=128, linear_type="Q4_1", embedding_type="Q8_0")
HALF_TOKEN_BYTES = kv_bytes_per_token(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float16)


@pytest.fixture
def checkpoint(tmp_path) -> str:
    return str(write_tiny_llama(tmp_path / "tiny.gguf", SHAPE))


def test_the_processor_is_used_when_asked_for():
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_auto_means_the_processor_and_cuda_is_refused(checkpoint):
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device is cuda, but torch finds no usable GPU"):
        load_worker(EngineConfig(checkpoint=checkpoint, device="cuda", num_blocks=4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable GPU here")
def test_with_a_gpu_auto_means_the_gpu():
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")


def test_the_number_of_blocks_is_taken_as_given(checkpoint):
    info = load_worker(EngineConfig(checkpoint=checkpoint, num_blocks=7, kv_bytes=1, block_size=8)).info
    assert (info.num_blocks, info.block_size) == (7, 8)
    assert info.kv_bytes_per_token == HALF_TOKEN_BYTES
    assert info.kv_bytes == (7 + 1) * 8 * HALF_TOKEN_BYTES  # one block pads tables


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_the_pool_has_as_many_blocks_as_its_bytes_hold(block_size, checkpoint):
    block_bytes = block_size * HALF_TOKEN_BYTES
    for kv_bytes, expected in ((block_bytes, 1), (5 * block_bytes - 1, 4), (5 * block_bytes, 5)):
        config = EngineConfig(checkpoint=checkpoint, kv_bytes=kv_bytes, block_size=block_size)
        assert load_worker(config).info.num_blocks == expected


def test_the_reference_keeps_twice_the_bytes_per_token(checkpoint):
    config = EngineConfig(checkpoint=checkpoint, kv_bytes=64 * HALF_TOKEN_BYTES, numerics="reference")
    info = load_worker(config).info
    assert info.kv_bytes_per_token == 2 * HALF_TOKEN_BYTES
    assert info.num_blocks == 2


def test_too_few_bytes_for_one_block_are_refused_with_both_numbers(checkpoint):
    block_bytes = 16 * HALF_TOKEN_BYTES
    config = EngineConfig(checkpoint=checkpoint, kv_bytes=block_bytes - 1)
    expected = f"kv_bytes is {block_bytes - 1}; one block of 16 tokens takes {block_bytes} bytes"
    with pytest.raises(ConfigError, match=expected):
        load_worker(config)


def test_a_pool_beyond_all_memory_is_refused_with_both_sizes(checkpoint):
    num_blocks = 2**31 - 1
    config = EngineConfig(checkpoint=checkpoint, num_blocks=num_blocks, block_size=256)
    num_bytes = num_blocks * 256 * HALF_TOKEN_BYTES
    expected = rf"num_blocks is {num_blocks}; the KV pool would take {num_bytes} bytes .* and \d+ .* are free"
    with pytest.raises(ConfigError, match=expected):
        load_worker(config)


@pytest.mark.parametrize("asked", [{"kv_bytes": 1 << 20}, {"num_blocks": 64}])
def test_a_pool_may_not_pass_what_is_free_at_the_start(checkpoint, monkeypatch, asked):
    for free, refused in ((1 << 30, False), (None, False), (1 << 10, True)):
        monkeypatch.setattr("core.execution.worker.free_pool_bytes", lambda _device, free=free: free)
        config = EngineConfig(checkpoint=checkpoint, **asked)
        if refused:
            ((name, value),) = asked.items()
            with pytest.raises(
                ConfigError, match=rf"^{name} is {value}; .* and {free} \(0\.0 GiB\) are free"
            ):
                load_worker(config)
        else:
            assert load_worker(config).info.num_blocks >= 64


def test_a_context_beyond_the_models_own_needs_an_option_of_its_own(checkpoint):
    config = EngineConfig(checkpoint=checkpoint, num_blocks=4, max_model_len=129)
    with pytest.raises(ConfigError, match=r"^max_model_len is 129; the model's own context is 128 tokens"):
        load_worker(config)
    allowed = msgspec.structs.replace(config, allow_longer_context=True)
    assert load_worker(allowed).info.max_model_len == 129


def test_the_default_pool_and_context_come_from_the_machine_and_the_checkpoint(checkpoint):
    info = load_worker(EngineConfig(checkpoint=checkpoint)).info
    assert info.block_size == 16
    assert info.max_model_len == 128
    assert 1 <= info.num_blocks <= 1 << 20
    assert info.kv_bytes == (info.num_blocks + 1) * 16 * HALF_TOKEN_BYTES
    assert (info.device, info.numerics) == (str(pick_device("auto")), "stable")


def test_a_worker_tells_what_it_is(checkpoint, tmp_path):
    info = load_worker(EngineConfig(checkpoint=checkpoint, num_blocks=4, device="cpu")).info
    assert (info.architecture, info.vocab_size) == ("llama", 64)
    assert info.model_file_bytes == (tmp_path / "tiny.gguf").stat().st_size
    assert info.kernels == {"int8_split": 2 * 4 + 1}, "one of queries, keys and values, one of gate and up"
    rows_of_64, rows_of_128 = 2 * (64 + 2 * 32 + 64 + 2 * 128) + 64, 2 * 64
    embedding = 64 * 64 // 32 * 34  # as stored: the output's kernel has no plain rows to share
    eight_bit = rows_of_64 * (64 + 4) + rows_of_128 * (128 + 4)  # a byte each, and a scale per row
    assert info.packed_weight_bytes == eight_bit + embedding
    assert info.load_s > 0
    assert info.num_threads == torch.get_num_threads()


def test_a_shorter_context_is_taken_as_given(checkpoint):
    assert (
        load_worker(EngineConfig(checkpoint=checkpoint, num_blocks=4, max_model_len=40)).info.max_model_len
        == 40
    )


def test_the_number_of_threads_is_taken_as_given(checkpoint):
    before = torch.get_num_threads()
    try:
        config = EngineConfig(checkpoint=checkpoint, num_blocks=4, num_threads=before + 1)
        assert load_worker(config).info.num_threads == before + 1
    finally:
        torch.set_num_threads(before)


def test_what_may_not_share_kv_has_another_namespace(tmp_path):
    """Model, numerics and the width of stored KV all count; where the file lies does not."""
    paths = [write_tiny_llama(tmp_path / name, SHAPE) for name in ("a.gguf", "b.gguf")]
    other = write_tiny_llama(tmp_path / "c.gguf", TinyShape(vocab_size=64, context=64, linear_type="Q4_1"))

    def namespace(path, numerics="stable"):
        return load_worker(EngineConfig(checkpoint=str(path), num_blocks=2, numerics=numerics)).info.namespace

    assert namespace(paths[0]) == namespace(paths[1])
    distinct = {namespace(paths[0], numerics) for numerics in ("stable", "fast", "reference")}
    assert len({*distinct, namespace(other)}) == 4
    assert all(len(name) == 32 for name in distinct)


@pytest.mark.parametrize("numerics", ["stable", "fast", "reference"])
@ON_EVERY_DEVICE
def test_every_numerics_samples_and_tells_where_the_time_went(numerics, device, checkpoint):
    worker = load_worker(
        EngineConfig(checkpoint=checkpoint, num_blocks=8, numerics=numerics, device=device, block_size=4)
    )
    plan = step(
        planned("a", [1, 2, 3, 4, 5], blocks=[7, 0]),
        planned("inside a prompt", [9, 8], blocks=[3], num_samples=0),
        planned("b", [6], blocks=[2]),
    )
    result = worker.execute(plan)
    assert result.step_id == plan.step_id
    assert [sample.request_id for sample in result.samples] == ["a", "b"]
    assert all(len(s.token_ids) == 1 and 0 <= s.token_ids[0] < 64 and s.error is None for s in result.samples)
    assert min(result.build_s, result.forward_s, result.sample_s) > 0
    worker.close()


def test_a_step_without_samples_computes_and_returns_none(checkpoint):
    worker = load_worker(EngineConfig(checkpoint=checkpoint, num_blocks=4))
    result = worker.execute(step(planned("a", [1, 2], blocks=[0], num_samples=0)))
    assert result.samples == ()


def test_a_table_without_a_block_for_a_position_is_our_own_mistake(checkpoint):
    worker = load_worker(EngineConfig(checkpoint=checkpoint, num_blocks=4))
    with pytest.raises(AssertionError, match="a: 1 blocks for 2"):
        worker.execute(step(planned("a", [1], first_position=16, blocks=[0])))


def test_the_workers_memory_is_the_processs(checkpoint):
    worker = load_worker(EngineConfig(checkpoint=checkpoint, num_blocks=4))
    assert worker.memory().rss_bytes >= worker.memory().anonymous_bytes > 0


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such file"):
        load_worker(EngineConfig(checkpoint=str(tmp_path / "absent.gguf")))
