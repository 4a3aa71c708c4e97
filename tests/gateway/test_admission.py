"""Permits: as many as there are, each given back, none after the door has closed."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.admission import Admission
from gateway.errors import Draining, InvalidRequest, Overloaded


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
    admission = Admission(max_running=1, max_reading_bytes=100)
    with admission.reading(60), admission.reading(40):
        with pytest.raises(Overloaded), admission.reading(1):
            raise AssertionError
        admission.check()
    with admission.reading(1000):
        assert admission.num_reading_bytes == 1000
    assert admission.num_reading_bytes == 0
