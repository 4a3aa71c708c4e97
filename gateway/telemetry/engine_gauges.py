"""What an engine's numbers are called in `/metrics`. Label sets are fixed: no request or tenant in them."""

from collections.abc import Iterator, Mapping

from core import Engine
from gateway.backends import Gauge


def engine_gauges(engine: Engine, *, memory: Mapping[str, int]) -> Iterator[Gauge]:
    """Every series of an engine, read now. `memory` is the worker's newest sample by kind."""
    yield from _queue_gauges(engine)
    yield from _token_gauges(engine)
    yield from _time_gauges(engine)
    for kind, num_bytes in memory.items():
        yield Gauge("tidegate_worker_memory_bytes", "The worker's memory.", num_bytes, labels={"kind": kind})
    info = engine.info
    yield Gauge(
        "tidegate_packed_weight_bytes", "What the kernels read of the weights.", info.packed_weight_bytes
    )
    yield Gauge("tidegate_model_file_bytes", "Size of the model file.", info.model_file_bytes)
    yield Gauge("tidegate_kv_bytes", "Size of the KV pool.", info.kv_bytes)


def region_gauges(regions: Mapping[str, int], *, num_compilations: int) -> Iterator[Gauge]:
    """How many parts of the model run compiled, by the worker's newest sample."""
    yield from _labelled(
        "regions",
        "Parts of the model: compiled, eager, or compiled and waiting for the next start.",
        label="state",
        values=regions,
        counter=False,
    )
    yield _counter(
        "compilations", "Parts compiled in the background since the worker's start.", num_compilations
    )


def _queue_gauges(engine: Engine) -> Iterator[Gauge]:
    now = engine.stats().scheduler
    yield Gauge("tidegate_requests_running", "Requests being computed.", now.num_running)
    yield Gauge("tidegate_requests_waiting", "Requests queued in the engine.", now.num_waiting)
    blocks = {"free": now.num_free_blocks, "held": now.num_held_blocks, "evictable": now.num_evictable_blocks}
    yield from _labelled(
        "kv_blocks", "KV blocks by state; their sum is the pool.", label="state", values=blocks, counter=False
    )
    yield Gauge("tidegate_kv_blocks_cached", "KV blocks in the prefix tree.", now.num_cached_blocks)
    yield Gauge(
        "tidegate_kv_waste_ratio", "Share of the slots of held blocks in which nothing stands.", now.waste
    )
    yield _counter("preemptions", "Requests that lost their blocks and started over.", now.num_preemptions)


def _token_gauges(engine: Engine) -> Iterator[Gauge]:
    stats = engine.stats()
    now = stats.scheduler
    yield _counter("prefix_query_tokens", "Prompt tokens looked up in the prefix tree.", now.num_query_tokens)
    yield _counter("prefix_hit_tokens", "Prompt tokens found there.", now.num_hit_tokens)
    yield _counter("computed_tokens", "Tokens computed, recomputed ones included.", now.num_computed_tokens)
    yield _counter("generated_tokens", "Tokens sampled, running requests' too.", now.num_output_tokens)
    kinds = {
        "prefill": stats.num_prefill_tokens,
        "recomputed": stats.num_recomputed_tokens,
        "decode": stats.num_decode_tokens,
    }
    yield from _labelled("step_tokens", "Tokens of steps by kind.", label="kind", values=kinds)


def _time_gauges(engine: Engine) -> Iterator[Gauge]:
    stats = engine.stats()
    yield _counter("steps", "Engine steps.", stats.num_steps)
    yield _counter("failed_steps", "Engine steps that raised.", stats.num_failed_steps)
    yield _counter("batched_requests", "Sum of the steps' batch sizes.", stats.num_batched_requests)
    yield _counter("step_seconds", "Time in steps.", stats.execute_s)
    parts = {
        "schedule": stats.schedule_s,
        "build": stats.build_s,
        "forward": stats.forward_s,
        "sample": stats.sample_s,
        "transfer": max(0.0, stats.execute_s - stats.build_s - stats.forward_s - stats.sample_s),
        "deliver": stats.deliver_s,
    }
    yield from _labelled("step_part_seconds", "Time of the loop's turns by part.", label="part", values=parts)
    yield Gauge("tidegate_slowest_step_seconds", "The longest step so far.", stats.slowest_s)
    yield from _labelled(
        "request_state_seconds",
        "Time of ended requests by state.",
        label="state",
        values=stats.request_s,
    )
    yield _counter("worker_restarts", "Workers loaded anew after one died.", stats.num_restarts)


def _counter(name: str, description: str, value: float) -> Gauge:
    return Gauge(f"tidegate_{name}", description, value, counter=True)


def _labelled(
    name: str, description: str, *, label: str, values: Mapping[str, float], counter: bool = True
) -> Iterator[Gauge]:
    for key, value in values.items():
        yield Gauge(f"tidegate_{name}", description, value, counter=counter, labels={label: key})
