"""Student's t, against scipy and against the table of every textbook."""

from __future__ import annotations

import pytest
import scipy

from ares_exp.records.statistics.estimate import t_quantile, two_sided_p


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (10, 2.2281), (30, 2.0423), (120, 1.9799)]
)
def test_the_quantiles_of_textbooks(freedom: int, expected: float) -> None:
    assert t_quantile(freedom, 0.975) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 29, 100, 1_000, 49_999])
def test_quantiles_and_tails_are_scipys(freedom: int) -> None:
    for probability in (0.5, 0.51, 0.75, 0.9, 0.975, 0.995, 0.9999, 0.1, 0.025):
        expected = scipy.special.stdtrit(freedom, probability)
        assert t_quantile(freedom, probability) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for value in (0.0, 1e-9, 0.1, 0.7, 1.96, 3.0, 8.5, 40.0, 1e4):
        expected = 2 * scipy.special.stdtr(freedom, -value)
        assert two_sided_p(freedom, value) == pytest.approx(expected, rel=1e-7, abs=1e-300)
