"""Many runs that are killed at moments spread over them, and resumed until they are complete.

`python -m tests.soak.kills BACKEND COUNT [SEED] [OVERRIDE …]` prints a line for each.
`tests.e2e.killed_run.check` checks each: no turn is paid twice except the call in progress, no finished episode is run
again, and no container and no partial file is left.
"""

import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import KINDS, KilledRun, kill_and_resume, make_tasks, moments


def main(
    backend: str,
    count: int,
    seed: int,
    overrides: Sequence[str],
    *,
    endpoint_type: type[CountingEndpoint] = CountingEndpoint,
    tasks: Sequence[str] = KINDS,
) -> int:
    rng, failed, started = random.Random(seed), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, endpoint_type() as endpoint:
        directory = Path(temporary)
        (directory / "whole").mkdir()
        make_tasks(directory / "whole", tasks)
        whole = KilledRun(directory / "whole", endpoint, backend, overrides)
        assert whole.start() == 0, whole.said
        told: Counter[str] = Counter()
        for number, moment in enumerate(moments(count, endpoint.asked.total(), rng)):
            with endpoint_type() as own:
                (directory / str(number)).mkdir()
                make_tasks(directory / str(number), tasks)
                run = KilledRun(directory / str(number), own, backend, overrides)
                try:
                    says = kill_and_resume(run, whole, moment, rng)
                except (AssertionError, OSError, subprocess.TimeoutExpired):
                    failed += 1
                    says = f"FAILED: {traceback.format_exc()}\n{run.said}"
                told["calls in progress that were lost"] += own.asked.total() - len(own.asked)
                told["kills"] += run.kills
                told["turns asked more than twice"] += sum(times > 2 for times in own.asked.values())
            print(f"{number:3} {moment.requests} {moment.file} +{moment.seconds:.3f} s: {says}", flush=True)
    print(f"{count} moments, {failed} failed, {dict(told)}, seed {seed}, {time.monotonic() - started:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    given = sys.argv[1:]
    raise SystemExit(main(given[0], int(given[1]), int(given[2]) if len(given) > 2 else 0, given[3:]))
