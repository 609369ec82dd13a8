"""What the service does wrong on demand."""

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any, Literal

FaultKind = Literal["status", "status_after", "drop", "drop_after", "slow", "half", "lost"]


@dataclass(eq=False)
class Fault:
    """One thing to go wrong.

    Attributes:
        kind: `status`: the request is refused and not acted upon. `status_after`: it is acted upon, and answered as if
            it had failed. `drop`: the connection is cut before anything is done. `drop_after`: after it was done,
            without an answer. `slow`: everything starts `seconds` later. `half`: half of the answer's body arrives,
            then the connection is cut (of a download: half of its first file). `lost`: the sandbox that is asked dies
            first; the request then fares as it does with a dead one.
        method: HTTP method; `None`: any.
        path: Regular expression searched in the path, which is without query.
        times: How often, counted in requests; `None`: always.
        skip: Requests that pass unharmed before the first.
        status: HTTP status of `status` and `status_after`.
        retry_after: Value of a Retry-After header, seconds.
        seconds: Duration of `slow`.
        body: What the error answer says instead of the usual: JSON, or text.
        hits: How many requests it has met.
        met: Set when it has met one.
    """

    kind: FaultKind
    method: str | None = None
    path: str = ""
    times: int | None = 1
    skip: int = 0
    status: int = 500
    retry_after: int | str | None = None
    seconds: float = 0.0
    body: Any = None
    hits: int = 0
    met: asyncio.Event = field(default_factory=asyncio.Event)

    def meets(self, method: str, path: str) -> bool:
        """Whether it befalls this request; counted if so."""
        if self.times == 0 or self.method not in (None, method) or not re.search(self.path, path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        self.hits += 1
        self.met.set()
        return True


class Faults(list[Fault]):
    """The faults that are to come, in the order in which they were added. One request meets one of them at most."""

    def add(self, fault: Fault) -> Fault:
        self.append(fault)
        return fault

    def next(self, method: str, path: str) -> Fault | None:
        return next((fault for fault in self if fault.meets(method, path)), None)
