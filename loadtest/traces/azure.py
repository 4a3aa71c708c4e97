"""Azure's inference traces of 2023 and 2024: arrival and two lengths, no sessions, no prefixes.

Source: github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv.
"""

import csv
import re
from datetime import UTC, datetime

from loadtest.errors import PlanInvalid
from loadtest.traces import Trace, TraceRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS = 10_000_000


class Azure:
    name = "azure"

    def fits(self, first_line: str) -> bool:
        return first_line.strip() == ",".join(COLUMNS)

    def read(self, text: str, source: str) -> Trace:
        rows = csv.reader(text.splitlines())
        if (header := tuple(next(rows, ()))) != COLUMNS:
            raise PlanInvalid(f"{source}, line 1: the columns are {header}; they must be {COLUMNS}")
        requests: list[TraceRequest] = []
        start: float | None = None
        for row in rows:
            if not row:
                continue
            where = f"{source}, line {rows.line_num}"
            if len(row) != len(COLUMNS):
                raise PlanInvalid(f"{where}: there are {len(row)} fields; there must be {len(COLUMNS)}")
            at = _seconds(row[0], where)
            start = at if start is None else start
            requests.append(
                TraceRequest(
                    session=None,
                    at_s=at - start,
                    num_input_tokens=_count(row[1], f"{where}: ContextTokens", least=1),
                    num_output_tokens=_count(row[2], f"{where}: GeneratedTokens", least=0),
                )
            )
        return Trace(name=source, format=self.name, clock="wall", requests=tuple(requests))


def _seconds(text: str, where: str) -> float:
    """The fraction is kept apart: it has seven digits, more than Python's dates take."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d+)?(\+00:00)?", text.strip())
    if match is None:
        raise PlanInvalid(f"{where}: TIMESTAMP is {text!r}; it must be like 2023-11-16 18:17:03.9799600")
    try:
        whole = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError as error:
        raise PlanInvalid(f"{where}: TIMESTAMP {text!r} is no date: {error}") from error
    return whole.timestamp() + float(match[2] or 0)


def _count(text: str, field: str, *, least: int) -> int:
    value = int(text) if re.fullmatch(r"\d{1,9}", text.strip()) else -1
    if not least <= value <= MAX_TOKENS:
        raise PlanInvalid(f"{field} is {text!r}; it must be a number between {least} and {MAX_TOKENS}")
    return value


FORMAT = Azure()
