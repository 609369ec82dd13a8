"""Checks whether a code agent can be run again from its journal, which is what snapshots of its episodes need.

The test of an agent is three lines, and needs no container and no model:

```python
async def test_episodes_of_my_agent_can_be_snapshotted() -> None:
    await check_agent(MyAgentFactory(), replies=["ls /app", "cat /app/main.py", "done"])
```

A snapshot keeps nothing of the agent but what it asked for and what it got. To go on, a new agent is run and given the
same answers, in the same order; it has to ask for the same things. So it has to keep these rules:

1. It learns of the world only through the `llm_client` and the `container` that it is given. No sockets, processes
   or files of the host. It may write (logs, metrics), as long as it does not look at what came of it.
2. It waits only for those, and with asyncio: tasks, timers, locks, queues, timeouts, in any combination. No threads but
   `asyncio.to_thread(function)`, of a function that depends on nothing but its arguments: it will be called again.
   No going round in `asyncio.sleep(0)` until something has come: nothing comes while the agent runs.
3. The time, random values and ids come from the modules, when they are needed: `time.time()`, `random.random()`,
   `uuid.uuid4()`. Not from `datetime.now()`, `os.urandom`, `secrets`, `random.Random()` without a seed, or a function
   that was imported by its name (`from time import time`).
4. No `id()`, no `hash()` and no order of a set of strings in what it asks for. Sort, or use dicts, which keep theirs.
5. How it is made depends on its options alone: no files, environment variables or globals that may change.
6. What it asks for, gets and raises is plain data. What its tools raise is a `ContainerError`, an `OSError`, a
   `TimeoutError` or another common error of Python's: others cannot be kept.
7. No state that episodes share: nothing mutable in modules and classes.
8. No `except` that depends on which exception object it caught, only on its class and its arguments.
9. Its prompts and commands are part of what it is. Changing them makes the snapshots of running episodes useless.

What breaks the first two rules is refused while the agent runs. The others are found here, by running the agent again
after every step, in this process and in two new ones with other hash seeds. An agent that cannot keep the rules says so
(`deterministic = False` on its factory); if it offers `get_state`, `set_state` and `resume`, these are checked instead.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import cast

from ares_exp.agents.code_agent import AgentContainer, CodeAgentFactory, StatefulAgent
from ares_exp.agents.rehearsal import RecordedStep, Recording, Untouchable, run_again
from ares_exp.agents.rehearsal_container import RehearsalContainer
from ares_exp.agents.rehearsal_process import FactoryRecipe, package_of, run_again_in_new_processes
from ares_exp.containers.container import Container
from ares_exp.environments.agent_host import AgentHost, is_deterministic
from ares_exp.environments.hosted_agent import AgentState
from ares_exp.errors import (
    AgentError,
    DivergenceError,
    NondeterministicCallError,
    SnapshotUnsupportedError,
)
from ares_exp.journal.encoding import JournalEncoder
from ares_exp.journal.journal import CallEntry, Journal, StepEntry
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse

Replies = Sequence[str | LLMResponse] | Callable[[LLMRequest], str | LLMResponse]
"""What the LLM says: in this order, or to that request."""

SEED = 20_240


async def check_agent(
    factory: CodeAgentFactory,
    *,
    replies: Replies,
    instruction: str = "Have a look around, then finish.",
    container: AgentContainer | None = None,
    max_steps: int = 100,
    in_new_process: bool = True,
    timeout_sec: float = 60.0,
) -> int:
    """Plays an episode; after every step, runs the agent again up to there and compares what it asks for.

    Args:
        factory: Makes the agents.
        replies: What the LLM says. When the last one is used up, the check ends, whether the agent has or not.
        instruction: What the agent is started on.
        container: What it works in, such as a started container; by default one that only answers something.
        max_steps: So many replies are given at most.
        in_new_process: Whether it is also run again in new processes, in which strings have other hashes. The factory
            then has to be an instance, made again by `type(factory)(**factory.options)`, a class or a function, and
            defined at the top of a module.
        timeout_sec: Bound on each step, seconds.

    Returns:
        The replies that were given.

    Raises:
        DivergenceError: Run again, the agent did something else; with the step and what it was.
        NondeterministicCallError: It asked its event loop for something that cannot be recorded.
        JournalError: It breaks a rule in another way.
        SnapshotUnsupportedError: It was told of something that no file can hold; or it is not deterministic and has no
            `get_state`.
        AgentError: It failed, or did not come to its next step.
        ValueError: The factory cannot be made again in a new process.
    """
    recipe = FactoryRecipe.of(factory) if in_new_process and is_deterministic(factory) else None
    check = _Check(factory, instruction, container or RehearsalContainer(), timeout_sec)
    try:
        steps = await check.play(replies, max_steps)
    finally:
        await check.host.cancel()
    if recipe is not None:
        await run_again_in_new_processes(recipe, check.recording, timeout_sec=timeout_sec)
    return steps


class _Check:
    """One episode."""

    def __init__(
        self, factory: CodeAgentFactory, instruction: str, container: AgentContainer, timeout_sec: float
    ) -> None:
        self._factory, self._timeout_sec = factory, timeout_sec
        self.recording = Recording(instruction, time.time(), SEED)
        self._journal: Journal | None = None
        if is_deterministic(factory):
            self._journal = Journal(self.recording.started_at, SEED)
        self._encoder = JournalEncoder()
        self.host = AgentHost(cast("Container", container), self._journal)

    async def play(self, replies: Replies, max_steps: int) -> int:
        """Plays and checks. Returns the number of replies."""
        queue = None if callable(replies) else iter(replies)
        self.host.start(self._factory, self.recording.instruction, timeout_sec=None)
        for step in range(max_steps + 1):
            request = await self._next_request(step)
            if self._journal is None:
                await self._check_state(step, request)
            else:
                await self._check_journal(step, self._journal, request)
            reply = None
            if request is not None and step < max_steps:
                reply = replies(request) if callable(replies) else next(queue or iter(()), None)
            if reply is None:
                return step
            self.host.answer(reply if isinstance(reply, LLMResponse) else LLMResponse.from_text(reply))
        return max_steps

    async def _next_request(self, step: int) -> LLMRequest | None:
        """The agent's next request; `None` when it has returned."""
        try:
            async with asyncio.timeout(self._timeout_sec):
                request = await self.host.next_request()
        except TimeoutError:
            self._raise_if_refused(step)
            raise AgentError(f"Step {step}: The code agent is not there after {self._timeout_sec:g} s.") from None
        except AgentError as error:
            self._raise_if_refused(step)
            raise type(error)(f"Step {step}: {error}") from error
        self._raise_if_refused(step)
        return request

    def _raise_if_refused(self, step: int) -> None:
        """Also what the agent has taken no notice of."""
        if (refused := self.host.runtime.refused) is not None:
            raise NondeterministicCallError(f"Step {step}: {refused}") from None

    async def _check_journal(self, step: int, journal: Journal, request: LLMRequest | None) -> None:
        runtime = self.host.runtime
        await self.host.quiesce(self._timeout_sec)
        try:
            if request is not None:
                assert self.host.observed is not None
                journal.entries.append(StepEntry(self.host.observed.call_id, timestamp=time.time()))
            try:
                lines = self._encoder.update(journal)
            except SnapshotUnsupportedError as error:
                raise SnapshotUnsupportedError(f"Step {step}: {error}") from None
            recording = self.recording
            recording.lines = list(lines)
            recording.originals |= {
                entry.call_id: entry.arguments
                for entry in journal.entries
                if isinstance(entry, CallEntry) and entry.kind == "llm"
            }
            recording.steps.append(RecordedStep(len(lines), runtime.elapsed_sec, runtime.open_calls, runtime.has_ended))
            await run_again(self._factory, recording, step, package=package_of(self._factory))
        finally:
            runtime.release()

    async def _check_state(self, step: int, request: LLMRequest | None) -> None:
        agent, kind = self.host.agent, type(self.host.agent).__name__
        if not isinstance(agent, StatefulAgent):
            raise SnapshotUnsupportedError(
                f"{kind} is not deterministic (its factory says so) and has no get_state(), set_state() "
                "and resume(): nothing can be checked, and its episodes cannot be snapshotted."
            )
        if request is None:
            return
        state = AgentState(agent.state_version, json.loads(json.dumps(agent.get_state())))
        host = AgentHost(cast("Container", Untouchable()), None)
        try:
            host.restore(self._factory, self.recording.instruction, timeout_sec=None, elapsed_sec=0.0, state=state)
            async with asyncio.timeout(self._timeout_sec):
                again = await host.next_request()
        finally:
            await host.cancel()
        if again != request:
            raise DivergenceError(
                f"Step {step}: {kind}, given its state, asks its LLM something else: {again!r:.300}, "
                f"and not {request!r:.300}."
            )
