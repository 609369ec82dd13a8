"""`check_agent`, which checks whether a code agent can be replayed, so that its episodes support snapshots.

A test of your agent has two lines, and needs no container and no model:

```python
async def test_episodes_of_my_agent_can_be_snapshotted() -> None:
    await check_agent(MyAgentFactory(), replies=["ls /app", "cat /app/main.py", "done"])
```

A snapshot contains the agent's journal: its LLM requests, its commands, and their results. To restore a snapshot,
ares_exp runs a new agent and gives it the recorded results in the same order. The new agent must make the same
requests and run the same commands. Your agent therefore has to follow these rules:

1. Its only inputs are its `llm_client` and its `container`. It uses no sockets, processes or files of the host. It may
   write logs and metrics, but must not read them.
2. It waits only for these two inputs, and only with asyncio (tasks, timers, locks, queues, timeouts, in any
   combination). Threads are allowed only as `asyncio.to_thread(function)`. The function must depend only on its
   arguments, because it is called again. Polling with `asyncio.sleep(0)` is not allowed, because no result arrives
   while the agent runs.
3. It gets times, random values and ids only by calls such as `time.time()`, `random.random()` and `uuid.uuid4()`. It
   does not use `datetime.now()`, `os.urandom`, `secrets`, `random.Random()` without a seed, or a function that was
   imported by name (`from time import time`).
4. Its requests do not depend on `id()`, `hash()` or the order of a set of strings. Sort, or use dicts, which keep their
   order.
5. Its construction depends only on its options: no files, environment variables or globals that may change.
6. Its requests, results and errors are plain data. Its tools raise a `ContainerError`, an `OSError`, a
   `TimeoutError` or another common error of Python. Other errors cannot be recorded.
7. Episodes share no state: modules and classes contain no mutable data.
8. The handling of an exception depends only on its class and its arguments, not on the exception object.
9. Its prompts and commands do not change between versions. Otherwise, earlier snapshots can no longer be restored.

A violation of the first two rules raises an error while the agent runs. To find other violations, `check_agent` runs a
second agent, which receives the same results. The calls of both agents are compared one by one. Meanwhile, the host's
clock has advanced, its random generators return other values, and the first agent still exists, so that objects have
different ids. The check cannot find:

- the order of a set of strings, and `hash()` of a string: both are the same within one process;
- a value that does not change during the check, such as a date or an environment variable, and a value that the agent
  reads but does not use in its requests;
- a blocking socket, or a thread of the agent, if both runs got the same result.

Such violations show only when a snapshot is restored: the restore then fails at the first call that differs.

If your agent cannot follow the rules, set `deterministic = False` on its factory. To support snapshots nevertheless,
add `get_state`, `set_state` and `resume` to the agent. `check_agent` then checks these methods after every step.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack, cast

from ares_exp.agents.code_agent import AgentContainer, CodeAgentFactory, StatefulAgent, as_agent_factory
from ares_exp.agents.runtime.journal import CallEntry, Journal, JournalEncoder, StepEntry, decode_journal
from ares_exp.containers.container import Container, ExecOptions, ExecResult
from ares_exp.environments.agent_host import AgentHost, AgentState
from ares_exp.errors import AgentError, DivergenceError, NondeterministicCallError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.testing.echo_container import RehearsalContainer

Replies = Sequence[str | LLMResponse] | Callable[[LLMRequest], str | LLMResponse]
"""The replies of the LLM: a sequence of texts or responses, or a function that returns the reply to a request."""

SEED = 20_240


async def check_agent(
    factory: CodeAgentFactory,
    *,
    replies: Replies,
    instruction: str = "Have a look around, then finish.",
    container: AgentContainer | None = None,
    max_steps: int = 100,
    timeout_sec: float = 60.0,
) -> int:
    """Runs an episode with scripted replies, replays it with a second agent, and compares the calls of both agents.

    Args:
        factory: Factory of the agents.
        replies: The replies of the LLM. The episode ends after the last reply, even if the agent has not finished.
        instruction: The task for the agent.
        container: The agent's container, such as a started container of a backend. By default, a container that only
            echoes commands.
        max_steps: Maximum number of replies.
        timeout_sec: Time limit of each step in seconds.

    Returns:
        The number of replies that the agent received.

    Raises:
        DivergenceError: The second run differed. The message describes the difference and the step.
        NondeterministicCallError: The agent used its event loop in a way that cannot be recorded.
        JournalError: The agent breaks another rule, so that its journal cannot be replayed.
        SnapshotUnsupportedError: The agent received a value that cannot be stored, or the agent is not deterministic
            and has no `get_state`.
        AgentError: The agent failed, sent no LLM request, or did not reach its next step.
    """
    check = _Check(factory, instruction, container or RehearsalContainer(), timeout_sec)
    try:
        steps = await check.execute(replies, max_steps)
        await check.run_again()
    finally:
        await check.host.cancel()
    return steps


class _Check:
    """The work of one `check_agent` call: an episode, and the second run of its agent."""

    def __init__(
        self, factory: CodeAgentFactory, instruction: str, container: AgentContainer, timeout_sec: float
    ) -> None:
        self._factory, self._instruction, self._timeout_sec = factory, instruction, timeout_sec
        is_deterministic = as_agent_factory(factory).deterministic
        self._journal = Journal(time.time(), SEED) if is_deterministic else None
        self.host = AgentHost(cast("Container", container), self._journal)

    async def execute(self, replies: Replies, max_steps: int) -> int:
        """Runs the episode, and returns the number of replies that the agent received."""
        queue = None if callable(replies) else iter(replies)
        self.host.start(self._factory, self._instruction, timeout_sec=None)
        for step in range(max_steps + 1):
            request = await self._next_request(step)
            if request is None:
                return step
            if self._journal is None:
                await self._check_state(step, request)
            else:
                assert self.host.observed is not None
                self._journal.entries.append(StepEntry(self.host.observed.call_id, timestamp=time.time()))
            reply = None
            if step < max_steps:
                reply = replies(request) if callable(replies) else next(queue or iter(()), None)
            if reply is None:
                return step
            self.host.respond(reply if isinstance(reply, LLMResponse) else LLMResponse.from_text(reply))
        return max_steps

    async def _next_request(self, step: int) -> LLMRequest | None:
        """Waits for the agent's next request; returns `None` if the agent has ended."""
        try:
            async with asyncio.timeout(self._timeout_sec):
                request = await self.host.next_request()
        except TimeoutError:
            self._raise_if_refused(step)
            raise AgentError(f"Step {step}: The agent sent no request within {self._timeout_sec:g} s.") from None
        except AgentError as error:
            self._raise_if_refused(step)
            raise type(error)(f"Step {step}: {error}") from error
        self._raise_if_refused(step)
        return request

    def _raise_if_refused(self, step: int) -> None:
        """Raises an error if the agent's event loop rejected an operation, even if the agent caught the exception."""
        if (refused := self.host.runtime.refused) is not None:
            raise NondeterministicCallError(f"Step {step}: {refused}") from None

    async def run_again(self) -> None:
        """Replays the journal with a second agent, which must end or wait for the same calls as the first agent."""
        journal, first = self._journal, self.host.runtime
        if journal is None:
            return
        await self.host.quiesce(self._timeout_sec)
        lines = JournalEncoder().update(journal)
        again = AgentHost(
            cast("Container", _NoContainer()),
            decode_journal(lines, started_at=journal.started_at, seed=journal.seed, where="the journal"),
        )
        requests = {e.call_id: e.arguments for e in journal.entries if isinstance(e, CallEntry) and e.kind == "llm"}
        try:
            again.restore(
                self._factory,
                self._instruction,
                timeout_sec=None,
                elapsed_sec=first.elapsed_sec,
                originals=requests,
            )
            second = again.runtime
            if second.has_ended != first.has_ended or second.open_calls != first.open_calls:
                expected, got = (_state(one.has_ended, one.open_calls) for one in (first, second))
                raise DivergenceError(
                    f"The first run of the agent {expected}, but the second run {got}. Both must end in the same way."
                )
        finally:
            await again.cancel()

    async def _check_state(self, step: int, request: LLMRequest) -> None:
        """Restores a second agent from the state of the first agent, and checks that it sends the same `request`."""
        agent, kind = self.host.agent, type(self.host.agent).__name__
        if not isinstance(agent, StatefulAgent):
            raise SnapshotUnsupportedError(
                f"The factory of {kind} declares that the agent is not deterministic. To snapshot its episodes, add "
                "get_state(), set_state() and resume() to the agent."
            )
        state = AgentState(agent.state_version, json.loads(json.dumps(agent.get_state())))
        host = AgentHost(cast("Container", _NoContainer()), None)
        try:
            host.restore(self._factory, self._instruction, timeout_sec=None, elapsed_sec=0.0, state=state)
            async with asyncio.timeout(self._timeout_sec):
                again = await host.next_request()
        finally:
            await host.cancel()
        if again != request:
            raise DivergenceError(
                f"Step {step}: With the same state, {kind} sends a different request: expected {request!r:.300}, "
                f"got {again!r:.300}.",
                step=step,
            )


def _state(has_ended: bool, open_calls: Sequence[int]) -> str:
    return "ended" if has_ended else f"waited for its calls {list(open_calls)}"


class _NoContainer:
    """The container for an agent's second run, which must execute nothing. Every call raises an error."""

    async def exec(self, command: str, **_: Unpack[ExecOptions]) -> ExecResult:
        raise AssertionError(f"Expected the second run to execute no command, but it executed {command!r}.")

    async def upload(self, source: str | Path, target: str | Path) -> None:
        raise AssertionError(f"Expected the second run to upload no files, but it uploaded {source}.")

    async def download(self, source: str | Path, target: str | Path) -> None:
        raise AssertionError(f"Expected the second run to download no files, but it downloaded {source}.")
