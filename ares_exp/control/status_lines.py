"""The state of a run in lines for people, on the terminal of the run and on any other."""

from __future__ import annotations

from collections.abc import Iterable

from ares_exp.control.status import RunStatus
from ares_exp.terminal.terminal import format_duration, format_number

SLOWEST = 3
SLOW_SEC = 5.0
"""An episode that has waited for less is not named."""
PLACES = {"start": "to start", "policy": "for the policy", "environment": "for the environment"}
ENDING = "to be released"


def status_lines(status: RunStatus) -> list[str]:
    """Returns the lines, none for what is not known."""
    found = [_held(status), _waiting(status), _totals(status), *_slowest(status)]
    found += [f"error: {one}" for one in status.errors]
    return [line for line in found if line]


def _held(status: RunStatus) -> str:
    held = status.held
    if held is None:
        return ""
    what = "paused" if status.state == "paused" else "pausing: what plays goes on to its end"
    if held.now:
        what = "paused: the policy is not asked"
    until = f", for {format_duration(held.until - status.written_at)} more" if held.until is not None else ""
    reason = f": {held.reason}" if held.reason else ""
    return f"{what}{until} (by {held.by}{reason})"


def _waiting(status: RunStatus) -> str:
    counts = sorted(status.waiting.items(), key=lambda one: -one[1])
    return f"waiting {', '.join(f'{PLACES.get(what, ENDING)}: {many}' for what, many in counts)}" if counts else ""


def _totals(status: RunStatus) -> str:
    cost = [f"${status.cost:,.4f}"] if status.cost else []
    speed = [f"{status.tokens:,} tokens, {status.tokens_per_sec:,.0f}/s"] if status.tokens else []
    return "; ".join([*_reward(status), *cost, *speed])


def _reward(status: RunStatus) -> Iterable[str]:
    value, low, high = status.reward
    if value is not None and low is not None and high is not None:
        yield f"reward {format_number(value)} [{format_number(low)}, {format_number(high)}]"


def _slowest(status: RunStatus) -> Iterable[str]:
    now = status.written_at
    slow = sorted((one for one in status.episodes if now - one.since >= SLOW_SEC), key=lambda one: one.since)
    for one in slow[:SLOWEST]:
        waited, whole = format_duration(now - one.since), format_duration(now - one.began)
        place = PLACES.get(one.waits_for, ENDING)
        yield f"{one.title}: step {one.num_steps}, has waited {waited} {place}, {whole} in all"
