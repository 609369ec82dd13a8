"""How many examples Hypothesis runs: the same ones each time, or so many times as many, drawn anew."""

import os
from collections.abc import Collection

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("ARES_EXP_TIMES", "1"))
"""How many times as many examples as usual are run (see `tests/soak/README.md`)."""


def examples(number: int, *, suppress_health_check: Collection[HealthCheck] = ()) -> settings:
    """Returns the settings of a test that runs so many examples."""
    return settings(
        max_examples=number * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        suppress_health_check=suppress_health_check,
    )
