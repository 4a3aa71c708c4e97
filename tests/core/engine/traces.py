"""Reads a trace file as its viewers do, and asserts that its slices lie inside each other."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_whole(path: Path) -> list[Event]:
    """A file that was closed: plain JSON."""
    events: list[Event] = json.loads(path.read_text())
    return events


def read_cut_off(path: Path) -> list[Event]:
    """A file whose writer was killed: viewers close the array themselves."""
    text = path.read_text()
    assert text.endswith(",\n"), "whole events only"
    events: list[Event] = json.loads(text.removesuffix(",\n") + "]")
    return events


def check_trace(events: list[Event]) -> None:
    """Every event has what its kind needs; slices of a thread and of each track nest."""
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
    _check_slices([event for event in events if event["ph"] == "X"])
    tracks: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            assert event["cat"] == "request"
            tracks[event["id"]].append(event)
    for track in tracks.values():
        _check_track(track)


def _check_slices(slices: list[Event]) -> None:
    """None begins inside another and ends outside it."""
    open_until: list[float] = []
    for event in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1], f"{event} ends outside what it began in"
        open_until.append(end)


def _check_track(track: list[Event]) -> None:
    """In time's order each end is that of the newest open slice; one state at a time, within the request."""
    stack: list[str] = []
    now = 0
    for event in track:
        assert event["ts"] >= now, "a track goes back in time"
        now = event["ts"]
        if event["ph"] == "b":
            assert (event["name"] == "request") is (not stack), f"{event} inside {stack}"
            assert len(stack) < 2
            stack.append(event["name"])
        else:
            assert stack, f"{event} ends nothing"
            assert stack.pop() == event["name"]


def states_of(events: list[Event], track: str) -> list[str]:
    """What a request was, one after the other."""
    return [e["name"] for e in events if e["ph"] == "b" and e["id"] == track and e["name"] != "request"]
