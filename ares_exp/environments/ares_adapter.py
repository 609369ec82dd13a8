"""`env=ares`, a source that runs the presets of the `martian-ares` package.

Importing `martian-ares` fetches a list of data sets from a server. The import therefore has a time limit, and
takes place only when tasks are loaded. The requests and responses of `martian-ares` have the same fields as in
ares_exp. Only tool definitions, tool choices, and messages that are tool calls have another form and are converted.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field, validate_call

from ares_exp.cancellation import finish
from ares_exp.environment import EnvironmentBase, EpisodeReport, LimitName, TimeStep, no_episode, restart, transition
from ares_exp.environments.source import Entry, EpisodeParts, Report, SelectingSource
from ares_exp.errors import ConfigError, PolicyError, PreflightError, close_matches
from ares_exp.llms.chat_messages import call_part, function_tool
from ares_exp.llms.request import REQUEST_DEFAULTS, LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData

CLOSE_TIMEOUT_SEC = 120.0
"""Time limit in seconds for closing the wrapped environment."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

logger = logging.getLogger(__name__)


class AresEnvironments(SelectingSource[SimpleNamespace]):
    """A source of the tasks of one preset of `martian-ares`. That package's task names, such as `20q:5`, are kept."""

    needs_container = False  # the package starts its own containers

    @validate_call
    def __init__(
        self,
        *,
        preset: Annotated[str, Field(min_length=1)],
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: Annotated[int, Field(ge=1)] | None = None,
        container: Literal["docker", "daytona"] = "docker",
        import_timeout_sec: Seconds = 120.0,
        timeout_sec: Seconds = 3600.0,
    ) -> None:
        """Validates the options.

        Args:
            preset: A preset of `martian-ares`, such as `20q`.
            tasks: Tasks to run: a name (`20q:5`), glob, index (`5`), slice (`0:10`) or shard (`@2/8`), or a list of
                these; `None` for all tasks.
            exclude: Names or globs of tasks to leave out.
            limit: Maximum number of tasks.
            container: Container type in `martian-ares`: `docker` or `daytona`. The option `container=…` of ares_exp has
                no effect, because `martian-ares` starts its own containers.
            import_timeout_sec: Time limit in seconds for importing `martian-ares`, which fetches a list of data sets
                from a server.
            timeout_sec: Time limit in seconds of one `reset` or `step` of a `martian-ares` environment.
        """
        super().__init__(f"ares ({preset})", tasks=tasks, exclude=exclude, limit=limit)
        self._ares_preset = preset
        self._container = container
        self._import_timeout_sec = import_timeout_sec
        self._timeout_sec = timeout_sec
        self._make: Any = None

    def load(self, report: Report) -> Sequence[str]:
        """Imports `martian-ares`, and selects tasks of the preset."""
        name, (self._make, info) = self._ares_preset, _import_ares(self._import_timeout_sec)
        known = {str(one.name): one.num_tasks for one in info()}
        count = known.get(name)
        if not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"Expected `env.preset` to be a martian-ares preset that has tasks, got {name!r}."
                f"{close_matches(name, known)} Available presets: {', '.join(sorted(known)[:20]) or 'none'}."
            )
        return self._hold(self._choose([SimpleNamespace(name=f"{name}:{index}") for index in range(count)]))

    def make(self, task_name: str, parts: EpisodeParts) -> AresEnvironment:
        """Creates the environment of one episode."""
        module = importlib.import_module(f"ares.containers.{self._container}")
        container = getattr(module, f"{self._container.capitalize()}Container")
        return AresEnvironment(
            task_name,
            make=partial(self._make, task_name, container_factory=container),
            response=partial(response_to_ares, module=importlib.import_module("ares.llms.response")),
            timeout_sec=self._timeout_sec,
        )


def _import_ares(timeout_sec: float) -> tuple[Any, Any]:
    """Imports the functions `make` and `info` of `martian-ares`. Blocking, for at most `timeout_sec`.

    The import runs in a daemon thread, because it opens connections, which may hang.

    Raises:
        PreflightError: The package is not installed, or its import fails or takes too long.
    """
    imported: Future[tuple[Any, Any]] = Future()

    def load() -> None:
        try:
            package = importlib.import_module("ares")
            importlib.import_module("ares.llms.response")
            imported.set_result((package.make, package.info))
        except BaseException as error:
            imported.set_exception(error)

    threading.Thread(target=load, name="import ares", daemon=True).start()
    try:
        return imported.result(timeout_sec)
    except Exception as error:
        what = f"`import ares` failed with {type(error).__name__}: {str(error)[:300]}"
        if not imported.done():
            what = f"`import ares` did not end within env.import_timeout_sec={timeout_sec:g}"
        elif isinstance(error, ModuleNotFoundError) and error.name == "ares":
            what = "env=ares needs the package martian-ares, which is not installed. Run `pip install martian-ares`"
        raise PreflightError(
            f"{what}. The package needs Python 3.12 or newer, and network access to download a list of data sets "
            "during its import."
        ) from error


class AresEnvironment(EnvironmentBase):
    """Runs one task of a preset in an environment of `martian-ares`, the wrapped environment.

    The wrapped environment does not report whether its agent, container or tests failed, so its exceptions propagate
    unchanged. If a limit of the run ends an episode, the episode has no reward, because the wrapped environment cannot
    score an unfinished episode. If the wrapped environment reaches its own step limit, the episode has the reward of
    the last step.
    """

    time_step: TimeStep[LLMRequest] | None = None
    current_task: str | None = None
    step_count = 0

    def __init__(
        self,
        task_name: str,
        *,
        make: Callable[[], Any],
        response: Callable[[LLMResponse], Any],
        timeout_sec: float = 3600.0,
    ) -> None:
        """Creates the environment, without starting anything.

        `make` creates the wrapped environment. It runs in a thread, because it may block while it downloads the task.
        `response` converts an `LLMResponse` to an action of the wrapped environment. `timeout_sec` is the time limit of
        each `reset` and each `step`.
        """
        self._make = make
        self._respond = response
        self._timeout_sec = timeout_sec
        self._wrapped: Any = None
        self._task_name = task_name
        self._truncated_by: LimitName | None = None

    async def reset(self) -> TimeStep[LLMRequest]:  # type: ignore[override]  # no seed, no options
        """Starts an episode. Raises `TimeoutError` if the wrapped environment does not start within `timeout_sec`."""
        await self.close()
        self.step_count = 0
        self._truncated_by = self.time_step = None
        self.current_task = self._task_name
        async with self._closing_on_failure("start"):
            made = await asyncio.to_thread(self._make)
            await made.__aenter__()
            self._wrapped = made
            first = await made.reset()
        self.time_step = restart(request_from_ares(first.observation))
        return self.time_step

    async def step(self, action: LLMResponse) -> TimeStep[LLMRequest]:
        """Passes `action` to the wrapped environment, and returns its next time step.

        Raises:
            EpisodeStateError: `step` was called before `reset()` or after LAST.
            PolicyError: The action calls a tool.
            TimeoutError: The step took longer than `timeout_sec`.
        """
        if self._wrapped is None or self.time_step is None:
            raise no_episode(ended=self.time_step is not None)
        self.time_step, pending = None, self._respond(action)
        async with self._closing_on_failure("take a step"):
            self.step_count += 1
            found = await self._wrapped.step(pending)
        reward = None if found.reward is None else float(found.reward)
        if found.step_type == "LAST":
            discount = float(found.discount or 0.0)
            self._truncated_by = "steps" if discount else None  # the only limit of the package
            await self.close()
            self.time_step = TimeStep("LAST", reward, discount, None)
        else:
            self.time_step = transition(request_from_ares(found.observation), reward or 0.0)
        return self.time_step

    @asynccontextmanager
    async def _closing_on_failure(self, what: str) -> AsyncIterator[None]:
        timer = asyncio.timeout(self._timeout_sec)
        try:
            async with timer:
                yield
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError) and timer.expired():
                raise TimeoutError(
                    f"The environment of martian-ares did not {what} within env.timeout_sec={self._timeout_sec:g}."
                ) from None
            raise

    def report(self) -> EpisodeReport:
        """Returns the task's name and the limit that ended the episode. `martian-ares` reports no other facts."""
        return EpisodeReport(task_name=self.current_task, truncated_by=self._truncated_by)

    async def close(self) -> None:
        """Closes the wrapped environment, even if the caller is cancelled. Idempotent."""
        wrapped, self._wrapped = self._wrapped, None
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        if wrapped is not None:
            await finish(_leave(wrapped))


async def _leave(wrapped: Any) -> None:
    try:
        await asyncio.wait_for(wrapped.__aexit__(None, None, None), CLOSE_TIMEOUT_SEC)
    except Exception as error:
        what = "An environment of martian-ares could not be closed, and may have left its container behind"
        logger.warning("%s: %s: %s", what, type(error).__name__, error)


def request_from_ares(request: Any) -> LLMRequest:
    """Converts a request of `martian-ares` to an `LLMRequest`. Missing fields get default values."""
    values = {name: getattr(request, name, default) for name, default in REQUEST_DEFAULTS.items()}
    if values["tools"] is not None:
        values["tools"] = [
            tool if "function" in tool else function_tool(tool["name"], tool.get("description"), tool["input_schema"])
            for tool in values["tools"]
        ]
    choice = values["tool_choice"]
    if isinstance(choice, Mapping) and choice.get("type") == "tool":
        values["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif choice == "any":
        values["tool_choice"] = "required"
    return LLMRequest([_message(message) for message in request.messages], **values)


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts a message of `martian-ares`. A separate tool call, which has no role, becomes an assistant message."""
    if "role" in message:
        return message
    call = call_part(message["call_id"], message["name"], message["arguments"])
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def response_to_ares(response: LLMResponse, module: Any) -> Any:
    """Converts a response to the types of `module` (`ares.llms.response`). Raises `PolicyError` for a tool call."""
    if any(isinstance(piece, ToolCallData) for piece in response.data):
        raise PolicyError("The policy responded with a tool call, but martian-ares supports only text.")
    return module.LLMResponse(
        data=[module.TextData(content=piece.content) for piece in response.data if isinstance(piece, TextData)],
        cost=response.cost,
        usage=module.Usage(
            prompt_tokens=response.usage.prompt_tokens, generated_tokens=response.usage.generated_tokens
        ),
    )
