"""What is remembered of one HTTP request while it runs: read by the access log and the metrics."""

import asyncio

from gateway.events import Event, Failed, Finished, Started, TextDelta, Usage
from gateway.telemetry.metrics import Metrics


class RequestRecord:
    """Written by the middleware and the handler of its own request, in that order."""

    def __init__(self, *, request_id: str, client_request_id: str | None) -> None:
        self.request_id = request_id
        """Ours, random: the only one ever used as a key."""
        self.client_request_id = client_request_id
        """The client's, if it is harmless: echoed and logged, nothing else."""
        self.tenant = ""
        """Whose key was given; empty where none is needed."""
        self.fields: dict[str, object] = {}
        """For the access log."""
        self._now = asyncio.get_running_loop().time
        self._started_s = self._now()
        self._last_delta_s: dict[int, float] = {}
        """By choice: two choices of one step are not two tokens in a row."""

    @property
    def age_s(self) -> float:
        return self._now() - self._started_s

    def saw(self, event: Event, metrics: Metrics) -> None:
        """Take note of one event of the answer."""
        match event:
            case TextDelta():
                now_s = self._now()
                if not self._last_delta_s:
                    self.fields["ttft_s"] = round(now_s - self._started_s, 6)
                    metrics.saw_first_delta(now_s - self._started_s)
                elif event.index in self._last_delta_s:
                    metrics.saw_next_delta(now_s - self._last_delta_s[event.index])
                self._last_delta_s[event.index] = now_s
            case Started():
                self.fields["num_prompt_tokens"] = event.num_prompt_tokens
            case Finished():
                self._saw_end(event.reason.value, event.usage, metrics)
            case Failed():
                self.fields["error"] = event.detail or event.message
                self._saw_end(event.code, event.usage, metrics)

    def _saw_end(self, outcome: str, usage: Usage, metrics: Metrics) -> None:
        self.fields["outcome"] = outcome
        self.fields["num_cached_tokens"] = usage.num_cached_tokens
        self.fields["num_output_tokens"] = usage.num_output_tokens
        self.fields["queue_s"] = round(usage.queue_s, 6)
        metrics.saw_usage(usage)
