"""Server-sent events out of bytes, wherever these are cut.

Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream".
"""

MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"


class EventTooLong(ValueError):
    """An event that passed the bound, or bytes that never become one."""


class EventStream:
    """Fed with the body of one answer."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._pending = bytearray()
        self._skip_lf = False
        self._at_start = True

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Names (mostly empty) and data of the events that these bytes complete. Comments are none.

        Raises:
            EventTooLong: more bytes without an end of event than the bound.
        """
        events: list[tuple[bytes, bytes]] = []
        if not self._pending and not self._at_start and data.endswith(b"\n\n") and b"\r" not in data:
            for block in data[:-2].split(b"\n\n"):
                if block.startswith(b"data: ") and b"\n" not in block:
                    events.append((b"", block[6:]))  # how nearly every event of a model looks
                else:
                    _read_block(block, events)
            return events
        self._append(data)
        end = self._pending.rfind(b"\n\n")
        if end >= 0:
            blocks = bytes(self._pending[:end])
            del self._pending[: end + 2]
            for block in blocks.split(b"\n\n"):
                _read_block(block, events)
        if len(self._pending) > self._max_event_bytes:
            raise EventTooLong(f"an event is longer than {self._max_event_bytes} bytes")
        return events

    def says_done(self) -> bool:
        """Whether what is left over is `[DONE]` without the blank line: some servers end so."""
        return bytes(self._pending).strip() in {b"data: " + DONE, b"data:" + DONE}

    def _append(self, data: bytes) -> None:
        if self._at_start:
            self._pending += data
            if b"\xef\xbb\xbf".startswith(self._pending):
                return  # perhaps a byte order mark; more will tell
            data = bytes(self._pending).removeprefix(b"\xef\xbb\xbf")
            self._pending.clear()
            self._at_start = False
        if self._skip_lf and data.startswith(b"\n"):
            data = data[1:]
            self._skip_lf = False
        if data:
            self._skip_lf = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self._pending += data


def _read_block(block: bytes, events: list[tuple[bytes, bytes]]) -> None:
    name = b""
    data: list[bytes] = []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    if data:
        events.append((name, b"\n".join(data)))
