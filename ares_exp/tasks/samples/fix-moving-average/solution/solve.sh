#!/usr/bin/env bash
set -euo pipefail

cat > /app/smoothing/averages.py <<'PYTHON'
"""Moving and exponential averages."""


def moving_average(values, window):
    """The mean of each run of `window` neighbouring values.

    The result has `len(values) - window + 1` items, none if there are fewer values than that. A window below 1 raises
    ValueError. `values` is not changed.
    """
    if window < 1:
        raise ValueError(f"expected a window of at least 1, got {window}")
    starts = range(len(values) - window + 1)
    return [sum(values[start : start + window]) / window for start in starts]


def exponential_average(values, alpha):
    """The running average `average = alpha * value + (1 - alpha) * average`, beginning with the first value.

    The result is a new list, as long as `values`; none for no values. An alpha outside of 0 < alpha <= 1 raises
    ValueError.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"expected 0 < alpha <= 1, got {alpha}")
    result = []
    for value in values:
        previous = result[-1] if result else value
        result.append(alpha * value + (1 - alpha) * previous)
    return result
PYTHON

# Without the seconds that unittest prints: a recorded episode of this task can be played again, word for word.
cd /app && python3 -B -m unittest 2>&1 | sed 's/ in [0-9.]*s$//'
