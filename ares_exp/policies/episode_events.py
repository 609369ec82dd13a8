"""The state of a running episode, and the deadline of its pending response."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from ares_exp.environment import TimeStep
from ares_exp.errors import PolicyError
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import EpisodeUsage

WaitsFor = Literal["start", "policy", "environment", "end"]
"""`start`: container and agent; `policy`: a response; `environment`: commands and, at the end, the verifier; `end`:
everything is released."""


class ResponseDeadline:
    """Deadline for one response: the earlier of the runner's limit and the end of the environment's time limit."""

    def __init__(self, limit_sec: float | None, left_sec: float | None) -> None:
        """Takes both limits in seconds from now; `None` is no limit."""
        now = asyncio.get_running_loop().time()
        self._given_up_at = now + limit_sec if limit_sec is not None else math.inf
        self._time_is_up_at = now + left_sec if left_sec is not None else math.inf
        self.timer = asyncio.timeout_at(self._when())

    @property
    def is_time_up(self) -> bool:
        """Whether the environment's limit, not the runner's, ended the wait."""
        return self.timer.expired() and self._time_is_up_at <= self._given_up_at

    def extend(self, seconds: float) -> None:
        """Moves the environment's limit: time that the policy waits for its endpoint does not count."""
        self._time_is_up_at += seconds
        self._reschedule()

    def hold(self, seconds: float) -> None:
        """Moves both limits: nobody was asked meanwhile."""
        self._given_up_at += seconds
        self.extend(seconds)

    def expire(self) -> None:
        """Has the environment's time be up now."""
        self._time_is_up_at = min(asyncio.get_running_loop().time(), self._given_up_at)
        self._reschedule()

    def _reschedule(self) -> None:
        if not self.timer.expired():
            self.timer.reschedule(self._when())

    def _when(self) -> float | None:
        first = min(self._given_up_at, self._time_is_up_at)
        return None if math.isinf(first) else first


@dataclass
class EpisodeEvents:
    """State of a running episode, and the hooks that its loop and its policy call; kept by the caller of the loop.

    Subclasses override the hooks, for example to record each paid response, or the episode at its LAST step.

    Attributes:
        usage: Tokens and cost of all responses that were paid for, and the number of those that the episode was given.
        policy_sec: Seconds that the policy took for these responses.
        waited_sec: Seconds of these in which the policy waited for its endpoint's rate limit.
        held_sec: Seconds of these in which the run was held, and the policy not asked.
        waits_for: What the episode waits for now.
        since: Start of that wait, in seconds of the monotonic clock.
        last: The LAST step, once it was reached.
        deadline: Deadline of the pending answer; `None` while no response is pending.
        is_cut_short: Whether the policy is not to be asked any more.
        unreachable: Why the pending request waits for its endpoint; `None`: the endpoint can be reached.
    """

    usage: EpisodeUsage = field(default_factory=EpisodeUsage)
    policy_sec: float = 0.0
    waited_sec: float = 0.0
    held_sec: float = 0.0
    waits_for: WaitsFor = "start"
    since: float = field(default_factory=time.monotonic)
    last: TimeStep[Any] | None = None
    deadline: ResponseDeadline | None = field(default=None, repr=False)
    is_cut_short: bool = False
    unreachable: PolicyError | None = None

    def wait_for(self, what: WaitsFor) -> None:
        """Records that the episode made progress and now waits for `what`."""
        self.waits_for, self.since = what, time.monotonic()

    def waited(self, seconds: float) -> None:
        """Adds seconds that the policy waited for its endpoint, and moves the response's deadline by as much."""
        self.waited_sec += seconds
        if self.deadline is not None:
            self.deadline.extend(seconds)

    def held(self, seconds: float) -> None:
        """Adds seconds in which the run was held: they count towards no time limit, and are no stall."""
        self.held_sec += seconds
        self.since = time.monotonic()
        if self.deadline is not None:
            self.deadline.hold(seconds)

    def cut_short(self) -> None:
        """Takes the pending answer back, as when the time is up, and lets no other be asked for."""
        self.is_cut_short = True
        if self.deadline is not None:
            self.deadline.expire()

    @property
    def is_time_up(self) -> bool:
        """Whether the environment's time limit passed while the response was awaited."""
        return self.deadline is not None and self.deadline.is_time_up

    @property
    def num_stages(self) -> int:
        """Number of finished stages of the task."""
        return 0

    def has_room(self, responses: int) -> bool:
        """Whether the limits of the episode let so many responses be applied, and another one after them."""
        return True

    def pay(self, response: LLMResponse) -> None:
        """Counts a response that has to be paid for, whether or not the episode receives it."""
        self.usage.pay(response)

    async def ended(self) -> None:
        """Called at LAST, before anything is released."""
