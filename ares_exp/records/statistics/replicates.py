"""One mean with its interval for several runs of one setting, for example with several seeds.

The tasks are a sample, and the results of a task with several seeds are a sample again: a nested design. The interval
resamples tasks, each with the results of all of its seeds. Davison & Hinkley (1997, "Bootstrap Methods and their
Application", section 3.8) show why the seeds of a resampled task are not resampled again with replacement: this would
count their variation twice. The variance of such a resampled mean has a closed form, which `estimate` computes, so that
no random numbers are needed: the seeds of a task are more attempts at it.

The design is nested only if a seed has independent effects on the tasks. If all tasks of a job share an effect, as with
checkpoints of several training runs, then the interval does not contain the variation of this effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ares_exp.records.run_summary import RunSummary


def pooled(runs: Sequence[RunSummary]) -> RunSummary:
    """Pools one or more runs. The attempts of each run count as further attempts at the same tasks."""
    stride = 1 + max((result.attempt for run in runs for result in run.results), default=0)
    results = (
        replace(result, attempt=number * stride + result.attempt)
        for number, run in enumerate(runs)
        for result in run.results
    )
    return RunSummary(sum(run.planned for run in runs), tuple(results), threshold=runs[0].threshold)
