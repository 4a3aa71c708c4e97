"""A rendered prompt that still knows which of its control tokens are genuine."""

import json
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RenderedPrompt:
    """What a chat template wrote.

    `marked_text` is what to look for control tokens in: where user text spelled one, or could have
    completed one, `marker` (a noncharacter found nowhere in the input) stands inside it. An empty
    `marker` means that nothing had to be marked. `text` is the prompt as a person would read it.
    """

    marked_text: str
    marker: str = ""

    @property
    def text(self) -> str:
        return self.unmark(self.marked_text)

    def unmark(self, piece: str) -> str:
        """`piece` of `marked_text` as it would read had nothing been marked."""
        if not self.marker:
            return piece
        # `tojson(ensure_ascii=True)` writes the marker as an escape. The marker was chosen so that
        # neither form of it occurs in the input.
        return piece.replace(self.marker, "").replace(marker_escape(self.marker), "")


def marker_escape(marker: str) -> str:
    """The marker as JSON writes it in ASCII, without the quotes."""
    return json.dumps(marker)[1:-1]
