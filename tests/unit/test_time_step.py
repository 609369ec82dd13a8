import pytest

from ares_exp.environments.time_step import TimeStep, restart, termination, transition, truncation


@pytest.mark.parametrize(
    ("step", "expected", "flags"),
    [
        (restart("o"), ("FIRST", None, None, "o"), (True, False, False)),
        (transition("o"), ("MID", 0.0, 1.0, "o"), (False, True, False)),
        (transition("o", 0.5), ("MID", 0.5, 1.0, "o"), (False, True, False)),
        (termination(1.0), ("LAST", 1.0, 0.0, None), (False, False, True)),
        (truncation(0.25), ("LAST", 0.25, 1.0, None), (False, False, True)),
        (truncation(None), ("LAST", None, 1.0, None), (False, False, True)),
    ],
)
def test_each_kind_of_step(step: TimeStep[str], expected: tuple[object, ...], flags: tuple[bool, ...]) -> None:
    assert tuple(step) == expected
    assert (step.first(), step.mid(), step.last()) == flags
