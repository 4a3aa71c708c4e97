"""Contestants that take turns: A B C, A B C, ...; never two at once, the others stay loaded and idle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.plan import Plan
from loadtest.report import Report
from tests.benchmarks.claims.serving import Server, load
from tests.benchmarks.cpu.verdict import Direction, Goal, Series, Verdict, judge

Figures = Mapping[str, float]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    rounds: int
    numerics: tuple[str, ...]
    """Of ours; the first is the one that goals count for."""
    peers: tuple[str, ...]
    """llama.cpp's forms (Q4_0, ...) and `openvino`."""
    kl: Mapping[str, float]
    """Mean KL by contestant, where it was measured."""
    say: Say = print

    def forms(self, *wanted: str) -> tuple[str, ...]:
        """Those of llama.cpp's forms that were asked for, in this order; all where none is named."""
        asked = tuple(peer for peer in self.peers if peer != "openvino")
        return tuple(form for form in asked if form in wanted) if wanted else asked


@dataclass(frozen=True)
class Contestant:
    name: str
    play: Callable[[], Figures]
    ours: bool = False


@dataclass(frozen=True)
class Work:
    """One line of the issue's table, measured: a figure of every contestant, and what was promised of it."""

    name: str
    unit: str
    better: Direction
    ours: tuple[Series, ...]
    peers: tuple[Series, ...] = ()
    goals: tuple[Goal, ...] = ()
    notes: tuple[str, ...] = ()
    more: Mapping[str, object] = field(default_factory=dict)
    """Other figures, for the JSON file."""

    def verdicts(self) -> list[Verdict]:
        goals = self.goals or (Goal(),)
        return [
            judge(ours, self.peers, better=self.better, goal=goal) for goal in goals for ours in self.ours
        ]


class Contest:
    """Played rounds, by contestant."""

    def __init__(self, contestants: Sequence[Contestant], options: Options) -> None:
        self._contestants = contestants
        self._options = options
        self.figures: dict[str, list[Figures]] = {each.name: [] for each in contestants}

    def play(self, what: str, *, rounds: int, warm_up: bool = True) -> "Contest":
        """The warm-up round counts for nothing: kernels are chosen, pages touched, caches filled."""
        for number in range(0 if warm_up else 1, rounds + 1):
            for each in self._contestants:
                figures = each.play()
                told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
                self._options.say(
                    f"{what}, {f'round {number}' if number else 'warm-up'}, {each.name}: {told}"
                )
                if number:
                    self.figures[each.name].append(figures)
        return self

    def work(
        self,
        name: str,
        figure: str,
        *,
        unit: str,
        better: Direction,
        goals: tuple[Goal, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> Work:
        """One figure of all who have it."""
        series = {
            each.name: Series(
                name=each.name,
                values=tuple(played[figure] for played in self.figures[each.name]),
                kl=self._options.kl.get(each.name),
            )
            for each in self._contestants
            if all(figure in played for played in self.figures[each.name])
        }
        return Work(
            name=name,
            unit=unit,
            better=better,
            ours=tuple(series[each.name] for each in self._contestants if each.ours and each.name in series),
            peers=tuple(
                series[each.name] for each in self._contestants if not each.ours and each.name in series
            ),
            goals=goals,
            notes=notes,
        )


LENIENT = ("--max-lag", "0.1", "--max-cpu", "0.98", "--max-drift", "0.05", "--look-every", "0")
"""Client and server share the cores here, so the client is late at times; for every contestant alike."""


def loaded(plan: Plan, server: Server, *arguments: str) -> Report:
    return load(plan, server, *LENIENT, *arguments)
