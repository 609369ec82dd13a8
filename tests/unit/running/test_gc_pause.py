from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ares_exp.running.gc_pause import ALLOCATIONS, collecting_seldom


@pytest.fixture(autouse=True)
def thresholds_afterwards() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("given", "inside"), [((700, 10, 10), ALLOCATIONS), ((90_000, 10, 10), 90_000), ((0, 10, 10), 0)]
)
def test_it_is_rarer_inside_and_as_before_afterwards(given: tuple[int, int, int], inside: int) -> None:
    gc.set_threshold(*given)

    def run() -> None:
        with collecting_seldom():
            assert gc.get_threshold() == (inside, 10, 10)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert gc.get_threshold() == given
