"""The state and the hooks of a running episode, and the deadline of its pending response."""

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
"""What an episode waits for.

`start`: the container and agent start. `policy`: the policy responds. `environment`: commands or the verifier run.
`end`: all resources are released.
"""


class ResponseDeadline:
    """The deadline of one response: the earlier of the runner's limit and the environment's limit.

    The runner limits the time for one response (`timeouts.policy`). The environment limits the time of the episode.
    """

    def __init__(self, limit_sec: float | None, left_sec: float | None) -> None:
        """Starts the runner's limit `limit_sec` and the environment's `left_sec`, in seconds; `None` for no limit."""
        now = asyncio.get_running_loop().time()
        self._given_up_at = now + limit_sec if limit_sec is not None else math.inf
        self._time_is_up_at = now + left_sec if left_sec is not None else math.inf
        self.timer = asyncio.timeout_at(self._when())

    @property
    def is_time_up(self) -> bool:
        """Whether the deadline has passed because of the environment's limit, not the runner's limit."""
        return self.timer.expired() and self._time_is_up_at <= self._given_up_at

    def extend(self, seconds: float) -> None:
        """Extends only the environment's limit, by the time for which the policy waited for its endpoint."""
        self._time_is_up_at += seconds
        if not self.timer.expired():
            self.timer.reschedule(self._when())

    def hold(self, seconds: float) -> None:
        """Extends both limits by the time in which no request could be sent."""
        self._given_up_at += seconds
        self.extend(seconds)

    def _when(self) -> float | None:
        first = min(self._given_up_at, self._time_is_up_at)
        return None if math.isinf(first) else first


@dataclass
class EpisodeEvents:
    """The state of a running episode, and hooks that the rollout loop and the policy call.

    Subclasses override the hooks, for example to record each paid response, or the episode at its LAST step.

    Attributes:
        usage: Tokens and cost of all paid responses, and the number of responses that the episode received.
        policy_sec: Time in seconds for which the episode waited for responses from the policy.
        waited_sec: Part of `policy_sec` in which the policy waited for its endpoint's rate limit.
        held_sec: Part of `policy_sec` in which the run was paused and sent no requests.
        waits_for: What the episode currently waits for.
        since: Start of the current wait, in seconds of the monotonic clock.
        last: Final time step (LAST); `None` until the episode reaches it.
        deadline: Deadline of the pending response; `None` while no response is pending.
        unreachable: Connection error of the pending request, which waits until its endpoint is reachable again. `None`
            if the endpoint is reachable.
    """

    usage: EpisodeUsage = field(default_factory=EpisodeUsage)
    policy_sec: float = 0.0
    waited_sec: float = 0.0
    held_sec: float = 0.0
    waits_for: WaitsFor = "start"
    since: float = field(default_factory=time.monotonic)
    last: TimeStep[Any] | None = None
    deadline: ResponseDeadline | None = field(default=None, repr=False)
    unreachable: PolicyError | None = None

    def wait_for(self, what: WaitsFor) -> None:
        """Records that the episode made progress and now waits for `what`."""
        self.waits_for, self.since = what, time.monotonic()

    def waited(self, seconds: float) -> None:
        """Adds seconds for which the policy waited for its endpoint. Extends the response's deadline accordingly."""
        self.waited_sec += seconds
        if self.deadline is not None:
            self.deadline.extend(seconds)

    def held(self, seconds: float) -> None:
        """Adds seconds for which the run was paused. They count neither towards time limits nor as a stall."""
        self.held_sec += seconds
        self.since = time.monotonic()
        if self.deadline is not None:
            self.deadline.hold(seconds)

    @property
    def is_time_up(self) -> bool:
        """Whether the environment's time limit passed while the episode waited for the response."""
        return self.deadline is not None and self.deadline.is_time_up

    @property
    def num_stages(self) -> int:
        """Number of finished stages of the task."""
        return 0

    def has_room(self, responses: int) -> bool:
        """Returns whether the episode's limits allow more than `responses` further responses."""
        return True

    def pay(self, response: LLMResponse) -> None:
        """Adds the tokens and the cost of a response to `usage`, even if the episode never receives the response."""
        self.usage.pay(response)

    async def ended(self) -> None:
        """Hook that runs when the episode reaches its LAST step, before its container and agent are released."""
