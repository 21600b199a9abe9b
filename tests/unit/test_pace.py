"""What a scheduler's steps tell about the rate of prefill."""

from engine_plugin.vllm.pace import Pace, Piece
from kvstore.testing import FakeClock


def test_a_piece_is_measured_when_its_request_goes_on():
    clock = FakeClock()
    pace = Pace(clock, steps_overlap=False)
    assert pace.step({"a": 512}) is None
    clock.advance(2.0)
    assert pace.step({"a": 1}) == Piece("a", 512, 2.0)
    clock.advance(1.0)
    assert pace.step({"b": 512}) is None, "a decode step says nothing"
    clock.advance(9.0)
    assert pace.step({"c": 512}) is None, "b went: the engine may have been idle"


def test_a_step_of_many_or_of_few_tokens_is_not_measured():
    clock = FakeClock()
    pace = Pace(clock, steps_overlap=False)
    for step in ({"a": 512, "b": 512}, {"a": 100}, {"a": 512, "b": 200}):
        pace.step(step)
        clock.advance(1.0)
        assert pace.step({"a": 1, "b": 1}) is None


def test_steps_that_overlap_take_the_time_until_the_one_after_the_next_is_planned():
    clock = FakeClock()
    pace = Pace(clock, steps_overlap=True)
    assert pace.step({"a": 512}) is None
    clock.advance(0.001)
    assert pace.step({"a": 256}) is None, "planned ahead, at once"
    clock.advance(2.0)
    assert pace.step({"a": 128}) == Piece("a", 512, 2.0)
    clock.advance(1.0)
    assert pace.step({"a": 1}) == Piece("a", 256, 1.0)
    clock.advance(0.5)
    assert pace.step({"a": 1}) == Piece("a", 128, 0.5)


def test_what_came_before_an_idle_engine_is_forgotten():
    clock = FakeClock()
    for steps_overlap in (False, True):
        pace = Pace(clock, steps_overlap=steps_overlap)
        pace.step({"a": 512})
        pace.step({})
        clock.advance(100.0)
        assert pace.step({"a": 512}) is None
        clock.advance(1.0)
        pace.step({"a": 1})
