"""Permits: as many as there are, each given back, none after the door has closed."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.admission import SMALL_BODY_BYTES, Admission
from gateway.errors import BodiesOverloaded, Draining, InvalidRequest, Overloaded


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of entering, leaving and closing."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(max_running=3)
        self.scopes: list[ExitStack] = []
        self.held: dict[ExitStack, int] = {}

    @rule(num=st.integers(1, 4))
    def enter(self, num: int) -> None:
        scope = ExitStack()
        try:
            scope.enter_context(self.admission.permit(num))
        except Draining:
            assert self.admission.draining
        except Overloaded:
            assert num <= 3 < self.num_held + num
        except InvalidRequest:
            assert num == 4
        else:
            assert not self.admission.draining
            self.scopes.append(scope)
            self.held[scope] = num

    @property
    def num_held(self) -> int:
        return sum(self.held[scope] for scope in self.scopes)

    @rule(which=st.integers(0, 2))
    def leave(self, which: int) -> None:
        if which < len(self.scopes):
            self.scopes.pop(which).close()

    @rule()
    def close_the_door(self) -> None:
        self.admission.close()

    @invariant()
    def permits_are_scopes(self) -> None:
        self.admission.check()
        assert self.admission.num_admitted == self.num_held <= 3

    def teardown(self) -> None:
        for scope in self.scopes:
            scope.close()
        assert self.admission.num_admitted == 0
        self.admission.check()


TestAdmissionMachine = AdmissionMachine.TestCase


@given(st.sampled_from([ValueError, KeyboardInterrupt, GeneratorExit]))
def test_a_permit_comes_back_whatever_ends_its_scope(error: type[BaseException]) -> None:
    admission = Admission(max_running=1)
    with pytest.raises(error), admission.permit():
        raise error
    with admission.permit():
        assert admission.num_admitted == 1


async def test_idle_waits_for_the_last_permit() -> None:
    admission = Admission(max_running=2)
    await admission.idle()
    first, second = ExitStack(), ExitStack()
    first.enter_context(admission.permit())
    second.enter_context(admission.permit())
    idle = admission.idle()
    first.close()
    second.close()
    await idle


def test_bodies_are_bounded_together_but_one_alone_always_fits() -> None:
    room = 10 * SMALL_BODY_BYTES
    admission = Admission(max_running=1, max_reading_bytes=room)
    with admission.reading() as first, admission.reading() as second, admission.reading() as small:
        first.grow(room - 10)
        small.grow(SMALL_BODY_BYTES)
        for grower in (first, second):
            with pytest.raises(BodiesOverloaded, match=f"{room - 10 + SMALL_BODY_BYTES} bytes"):
                grower.grow(SMALL_BODY_BYTES + 1)
        with pytest.raises(BodiesOverloaded):
            small.grow(1)
        admission.check()
    with admission.reading() as alone:
        alone.grow(2 * room)
        alone.grow(room)
        assert admission.num_reading_bytes == 3 * room
    assert admission.num_reading_bytes == 0
