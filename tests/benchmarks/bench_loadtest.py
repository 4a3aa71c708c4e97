"""What the load tester's client itself adds to what it measures, and how much it can carry.

    python -m tests.benchmarks.bench_loadtest [--streams 2000] [--seconds 20]

The mock is a process of its own and stamps each event with the time it was written at, on the clock that
both processes share: so the client's error is known apart from the mock's lateness. Both run uvloop.
"""

import argparse
import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import uvloop

from loadtest.client import Call, Client, encode_body
from loadtest.dialects import Ask, Dialect, Message, Reading, find_dialect
from loadtest.health import Health, HealthBounds, HealthMeter
from loadtest.mock.script import MockOptions
from loadtest.record import RequestRecord
from loadtest.transport import raise_open_files
from tests.loadtest.mock_process import mock_process, mock_stats

TTFT_S = 0.1
ITL_S = 0.02


class _Stamp(msgspec.Struct):
    created: float


_decode_stamp = msgspec.json.Decoder(_Stamp).decode


class StampedChat:
    """The chat dialect, and when the mock wrote what was read."""

    def __init__(self) -> None:
        self._chat = find_dialect("chat")
        self.name = self._chat.name
        self.path = self._chat.path
        self.written_at: list[float] = []

    def body(self, ask: Ask) -> dict[str, object]:
        return self._chat.body(ask)

    def read(self, data: bytes) -> Reading:
        reading = self._chat.read(data)
        if reading.text:
            self.written_at.append(_decode_stamp(data).created)
        return reading


def a_call(dialect: Dialect, number: int, *, max_tokens: int, at: float) -> Call:
    ask = Ask(model="mock", messages=(Message("user", " word" * 50 + f" {number}"),), max_tokens=max_tokens)
    body = encode_body(dialect, ask)
    return Call(id=f"r{number}", session=f"s{number}", turn=0, body=body, scheduled_at=at)


async def send_at(client: Client, call: Call) -> RequestRecord:
    await asyncio.sleep(max(0.0, call.scheduled_at - time.monotonic()))
    return await client.send(call)


async def send_all(
    url: str, dialect: Dialect, *, num: int, max_tokens: int, over_s: float
) -> list[RequestRecord]:
    start_at = time.monotonic() + 0.2
    calls = [a_call(dialect, i, max_tokens=max_tokens, at=start_at + over_s * i / num) for i in range(num)]
    async with Client(url, dialect) as client, asyncio.TaskGroup() as tasks:
        sending = [tasks.create_task(send_at(client, call)) for call in calls]
    return [task.result() for task in sending]


def quantiles(values: Sequence[float]) -> str:
    cut = statistics.quantiles(values, n=100, method="inclusive")
    return f"p50 {cut[49] * 1e3:6.2f}   p99 {cut[98] * 1e3:6.2f}   max {max(values) * 1e3:6.2f} ms"


async def accuracy(url: str) -> None:
    """One stream at a time has no neighbours; ten have. Both must come out at 100 and 20 ms."""
    for num, over_s in ((20, 20 * 0.6), (200, 12.0)):
        records = await send_all(url, find_dialect("chat"), num=num, max_tokens=20, over_s=over_s)
        ttft_s = [r.first_token_at - r.sent_at for r in records if r.first_token_at and r.sent_at]
        gaps_s = [b - a for r in records for a, b in pairwise(r.content_times)]
        assert len(ttft_s) == num, [r.fault for r in records]
        print(f"  {num} requests over {over_s:g} s")
        print(f"    TTFT off 100 ms by   {quantiles([abs(each - TTFT_S) for each in ttft_s])}")
        print(f"    ITL off 20 ms by     {quantiles([abs(each - ITL_S) for each in gaps_s])}")


async def lane(url: str, *, num: int) -> list[tuple[float, float]]:
    """One request after the other: when the mock wrote each event, and when the client read it."""
    dialect = StampedChat()
    pairs: list[tuple[float, float]] = []
    async with Client(url, dialect) as client:
        for number in range(num):
            dialect.written_at.clear()
            record = await client.send(a_call(dialect, number, max_tokens=20, at=time.monotonic()))
            pairs += zip(dialect.written_at, record.content_times, strict=True)
    return pairs


async def own_error(url: str) -> None:
    """Against what the mock really did: its lateness, and the machine's, are not the client's."""
    for num in (1, 10):
        async with asyncio.TaskGroup() as tasks:
            lanes = [tasks.create_task(lane(url, num=20)) for _ in range(num)]
        pairs = [task.result() for task in lanes]
        delays = [read - written for each in pairs for written, read in each]
        gaps = [abs((d - b) - (c - a)) for each in pairs for (a, b), (c, d) in pairwise(each)]
        print(f"  {num} streams at a time, against the times at which the mock wrote")
        print(f"    a stamp is later by  {quantiles(delays)}")
        print(f"    a gap is off by      {quantiles(gaps)}")


async def busiest_second(ended: asyncio.Event) -> float:
    """The client's largest CPU share of one second: the mean of a run includes its ramps."""
    shares = [0.0]
    while not ended.is_set():
        at, cpu_s = time.monotonic(), time.process_time()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 1.0)
            break
        shares.append((time.process_time() - cpu_s) / (time.monotonic() - at))
    return max(shares)


async def load(url: str, *, num: int, rate: float, seconds: float) -> None:
    max_tokens = int(rate * seconds)
    gc.collect()
    gc.freeze()
    before = mock_stats(url)["cpu_s"]
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        busiest = tasks.create_task(busiest_second(ended))
        with HealthMeter() as meter:
            records = await send_all(url, find_dialect("chat"), num=num, max_tokens=max_tokens, over_s=4.0)
        ended.set()
    print(f"  client CPU in its busiest second: {busiest.result():.1%} of a core")
    report_load(records, meter.health(), url=url, mock_cpu_before_s=before)


def report_load(records: list[RequestRecord], health: Health, *, url: str, mock_cpu_before_s: float) -> None:
    stats = mock_stats(url)
    num_events = sum(record.num_events for record in records)
    faults = [record.fault for record in records if record.fault is not None]
    print(f"  {len(records)} streams, {num_events} events, {len(faults)} failed, {health.duration_s:.1f} s")
    ordered = sorted(at for record in records for at in record.content_times)
    middle = ordered[len(ordered) // 4 : 3 * len(ordered) // 4]
    rate = len(middle) / (middle[-1] - middle[0])
    print(f"  events with content a second, in the middle half: {rate:.0f}")
    mock_cpu_s = stats["cpu_s"] - mock_cpu_before_s
    print(
        f"  client CPU {health.cpu_share:.1%} of a core ({health.cpu_s / num_events * 1e6:.1f} us an event)"
    )
    print(f"  mock CPU   {mock_cpu_s / health.duration_s:.1%} of a core")
    lag = [each * 1e3 for each in (health.lag_p50_s, health.lag_p99_s, health.lag_max_s)]
    print(f"  client loop lag p50 {lag[0]:.2f}   p99 {lag[1]:.2f}   max {lag[2]:.2f} ms")
    late = [stats[f"lateness_{name}_s"] * 1e3 for name in ("p50", "p99", "max")]
    print(f"  mock lateness   p50 {late[0]:.2f}   p99 {late[1]:.2f}   max {late[2]:.2f} ms")
    reasons = health.void_reasons(HealthBounds(max_cpu_share=0.85, max_lag_p99_s=0.01))
    print(f"  void: {'; '.join(reasons) or 'no'}")
    if faults:
        print(f"  first fault: {faults[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=10.0, help="events a second of each stream")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--load-only", action="store_true")
    options = parser.parse_args()
    raise_open_files()
    if not options.load_only:
        with mock_process(MockOptions(ttft_s=TTFT_S, itl_s=ITL_S, stamp=True)) as url:
            print("accuracy")
            uvloop.run(accuracy(url))
            uvloop.run(own_error(url))
            late = [
                f"{name} {mock_stats(url)[f'lateness_{name}_s'] * 1e3:.2f}" for name in ("p50", "p99", "max")
            ]
            print(f"  the mock itself was late by {'   '.join(late)} ms")
    print("load")
    with mock_process(MockOptions(ttft_s=1.0, itl_s=1.0 / options.rate)) as url:
        uvloop.run(load(url, num=options.streams, rate=options.rate, seconds=options.seconds))


if __name__ == "__main__":
    main()
