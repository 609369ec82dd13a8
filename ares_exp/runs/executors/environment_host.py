"""The environment host, a process on a node of a cluster in which environments of a run are executed.

Only the run opens connections. It calls methods of the host, and polls the host for news such as model requests,
records, reports and warnings. If the host receives no call within its lease time, it closes its environments and ends.
This module does not import Ray.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import platform
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ares_exp import __version__
from ares_exp.agents.code_agent import AgentFactoryBase, as_agent_factory, effective_agent
from ares_exp.cancellation import finish, happened, in_thread
from ares_exp.config.targets import instantiate_group
from ares_exp.containers.container import ContainerFactoryBase, as_container_factory
from ares_exp.containers.ownership import OwnedDirectory, short_lived_directory
from ares_exp.environment import EnvironmentBase, MinimalEnvironment, PendingRequest, TimeStep, complete
from ares_exp.environments.episode_limits import limited
from ares_exp.environments.own_model import ModelsElsewhere
from ares_exp.environments.source import EpisodeParts, SourceBase, make_scored_source
from ares_exp.errors import ConfigError, EpisodeStateError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.environment_responses import Asked
from ares_exp.runs.executors.executor import Recipe
from ares_exp.runs.executors.remote_messages import EnvironmentOrder, Facts, Failure, News, Outcome

REPORTS_SEC = 1.0
"""Minimum interval, in seconds, between two transfers of the environments' reports to the run."""
CLOSE_SEC = 30.0
"""Maximum time, in seconds, for closing the environments of a host when the host ends."""
PIECE_BYTES = 64 * 1024
"""Maximum size of a piece of an archive of files, in bytes. Ray is slow for objects over 100 kB."""

logger = logging.getLogger(__name__)


def versions_here() -> dict[str, str]:
    """Returns the versions of `ares_exp` and Python, which must be the same in a run and its hosts."""
    return {"ares_exp": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}


def parts_to_send(parts: EpisodeParts) -> dict[str, Any]:
    """Returns the arguments of an environment for a host, without the factories, which the host creates itself."""
    names = ("limits", "seed", "provide_solution", "start_from", "episode_id", "attempt", "output_dir")
    return {name: getattr(parts, name) for name in names}


class _Hosted(NamedTuple):
    """An environment in the host.

    `files` is the directory for the files of its episode. If `is_streamed`, the directory is only on the node, and the
    run fetches the files.
    """

    environment: EnvironmentBase
    files: Path | None
    is_streamed: bool


class EnvironmentHost(ModelsElsewhere):
    """Executes environments on a node. The run calls all methods through `call`, and all calls share one event loop."""

    def __init__(self, lease_sec: float, *, on_end: Callable[[], None] = lambda: None) -> None:
        """Creates a host without environments.

        Args:
            lease_sec: Number of seconds without a call from the run after which the host shuts down.
            on_end: Function that is called when the host has shut itself down.
        """
        self._lease_sec = lease_sec
        self._on_end = on_end
        self._source: SourceBase | None = None
        self._containers: ContainerFactoryBase | None = None
        self._agents: AgentFactoryBase | None = None
        self._hosted: dict[str, _Hosted] = {}
        self._heard_at = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self._untold: list[News] = []
        self._has_news = asyncio.Event()
        self._reported_at = 0.0
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Outcome]] = {}
        self._folder: OwnedDirectory | None = None
        self._has_ended = False

    async def call(self, words: bytes) -> bytes:
        """Calls a method of this host, and renews the lease. `words` is the method's name and arguments, pickled.

        Returns the pickled `Outcome`. This method pickles the data itself, because Ray transfers bytes faster than
        objects.
        """
        work = asyncio.current_task()
        assert work is not None
        self._work.add(work)
        try:
            return pickle.dumps(await Outcome.of(self._called, words))
        except Exception as error:  # the result cannot be pickled
            return pickle.dumps(Outcome(None, Failure.of(error)))
        finally:
            self._work.discard(work)

    async def _called(self, words: bytes) -> Any:
        now = time.monotonic()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="lease")
        elif now - self._heard_at > self._lease_sec or self._has_ended:
            raise EpisodeStateError("the host has ended, because it received no call from its run")
        self._heard_at = now
        method, arguments = pickle.loads(words)
        return await getattr(self, method)(*arguments)

    async def _watch(self) -> None:
        """Closes all environments and ends the host when the run has not called it for `lease_sec` seconds."""
        left = self._lease_sec
        while left > 0:
            await asyncio.sleep(left)
            left = self._heard_at + self._lease_sec - time.monotonic()
        logger.warning("The run sent no call for %g s. Its environments on this node are closed.", self._lease_sec)
        try:
            await self._close_all()
        finally:
            self._on_end()

    async def prepare(
        self,
        recipe: Recipe,
        digests: Mapping[str, str | None],
        parts: Mapping[str, Any],
        versions: Mapping[str, str],
        seen_file: tuple[Path, str] | None,
    ) -> tuple[list[str], bool]:
        """Creates the factories and the task set, and checks that this node can run the tasks.

        Args:
            recipe: Recipe from which the host creates the components of environments.
            digests: Digest of the content of each task of the run, by name; `None` for an unknown digest.
            parts: Result of `parts_to_send` for the arguments that all episodes have in common.
            versions: Versions of the run's software, by name.
            seen_file: Path and content of a file in the run directory, to test whether this node can read it; `None`
                without a run directory.

        Returns:
            Warnings for the user, and whether this node can access the run directory.

        Raises:
            UserError: The node cannot run the tasks, or its versions or task files differ from the run.
        """
        both = [(name, here, versions.get(name)) for name, here in versions_here().items()]
        if different := [f"{name} {here} instead of {run}" for name, here, run in both if here != run]:
            raise ConfigError(
                f"Expected the same versions as the run, but this node has {', '.join(different)}. Install the same "
                "versions on every node."
            )
        if recipe.cwd.is_dir():
            os.chdir(recipe.cwd)
        sys.path += [entry for entry in recipe.search_path if entry not in sys.path]
        warnings: list[str] = []
        from omegaconf import OmegaConf

        config = OmegaConf.create(dict(recipe.nodes))
        source = await asyncio.to_thread(make_scored_source, config)
        agents = as_agent_factory(await asyncio.to_thread(instantiate_group, config, "agent"))
        self._agents = effective_agent(agents, runs_solutions=parts["provide_solution"])
        self._containers = as_container_factory(await asyncio.to_thread(instantiate_group, config, "container"))
        names = await asyncio.to_thread(source.load, warnings.append)
        if missing := digests.keys() - names:
            raise ConfigError(f"This node lacks the run's task {min(missing)!r:.100}. Copy all tasks to every node.")
        source.keep(list(digests))
        self._source = source
        for model in source.own_models:
            model.ask_elsewhere(self)
        await source.preflight()
        if source.needs_container:
            await self._containers.preflight()
            await self._agents.preflight()
        await asyncio.to_thread(source.check, self._parts(parts), report=warnings.append)
        found = await asyncio.to_thread(lambda: {name: source.digest(name) for name in digests})
        if changed := [name for name, digest in digests.items() if found[name] != digest]:
            raise ConfigError(f"The files of task {changed[0]!r:.100} on this node differ from the files of the run.")
        self._folder = await asyncio.to_thread(short_lived_directory, "host")
        return warnings, seen_file is not None and await asyncio.to_thread(_sees, *seen_file)

    # Environments

    async def _make(self, name: str, order: EnvironmentOrder) -> None:
        assert self._source is not None, "prepare() comes first"
        parts = self._parts(order.parts)
        if order.streams and parts.output_dir is not None:
            assert self._folder is not None
            folder = await asyncio.to_thread(tempfile.mkdtemp, dir=self._folder.path)
            parts = replace(parts, output_dir=Path(folder) / "files")
        if order.has_background_requests:
            parts = replace(parts, background_client=self.background_client_of(name))
        environment = limited(self._source.make(order.task_name, parts), parts.limits)
        self.adopt(name, environment, files=parts.output_dir, is_streamed=order.streams)

    def adopt(
        self, name: str, environment: MinimalEnvironment, *, files: Path | None = None, is_streamed: bool = False
    ) -> None:
        """Adds an existing environment, which the run can call by its `name` and which is closed when the host ends."""
        self._hosted[name] = _Hosted(complete(environment), files, is_streamed)

    async def act(
        self, name: str, method: str, arguments: Mapping[str, Any], order: EnvironmentOrder | None = None
    ) -> tuple[Outcome, Facts]:
        """Calls the method `reset`, `step`, `truncate`, `export_state` or `close` of the environment `name`.

        If the environment does not exist, first creates it from the specification `order`. Returns the outcome of the
        call, and the state of the environment after the call.
        """
        if name not in self._hosted:
            if method == "close":
                return Outcome(), Facts()
            if order is not None:
                await self._make(name, order)
        hosted = self._of(name)
        if method == "export_state" and hosted.is_streamed:
            raise SnapshotUnsupportedError(
                "Snapshots are written on the node, which cannot access the run directory. Put the run directory on a "
                "disk that all nodes share, or set `snapshot=none`."
            )
        outcome = await Outcome.of(getattr(hosted.environment, method), **arguments)
        if method == "export_state" and outcome.failure is None:
            outcome = Outcome(outcome.value.snapshot_dir)
        elif (step := outcome.value) is not None:
            outcome = Outcome(TimeStep(step.step_type, step.reward, step.discount, step.observation))
        facts = await self._facts(hosted, method)
        if method == "close" and not facts.has_files:
            await self.drop(name)
        return outcome, facts

    async def _facts(self, hosted: _Hosted, method: str) -> Facts:
        environment = hosted.environment
        step_type = environment.time_step.step_type if environment.time_step is not None else None
        may_have_files = step_type in (None, "LAST") and hosted.is_streamed
        return Facts(
            report=environment.report(),
            step_type=step_type,
            step_count=environment.step_count,
            time_left_sec=environment.time_left_sec,
            activity=environment.activity,
            pending=tuple(environment.pending_requests()),
            past=tuple(environment.past_steps) if method in ("reset", "fork") else (),
            has_files=may_have_files and await asyncio.to_thread(_has_files, hosted.files),
        )

    async def changed(self, name: str, known: Sequence[int]) -> tuple[PendingRequest, ...]:
        """Waits until the ids of the environment's pending requests differ from `known`, and returns the requests."""
        stand_ins = [PendingRequest(call_id, "", None) for call_id in known]
        return tuple(await self._of(name).environment.changed_requests(stand_ins))

    async def grant(self, name: str, seconds: float) -> None:
        """Extends the time limit of an environment."""
        if name in self._hosted:
            self._hosted[name].environment.grant_time(seconds)

    async def fork(self, name: str, forks: Sequence[str], diversify: bool) -> list[Facts]:
        """Creates environments with the names `forks` from the current state of the environment `name`."""
        made = await self._of(name).environment.fork(len(forks), diversify=diversify)
        for fork, environment in zip(forks, made, strict=True):
            self.adopt(fork, environment)
        return [await self._facts(self._hosted[fork], "fork") for fork in forks]

    async def fetch(self, name: str, offset: int) -> tuple[bytes, bool]:
        """Returns the piece at `offset` of a tar archive of an episode's files, and whether more pieces follow.

        The call with offset 0 creates the archive. After the last piece, the archive and the files are removed.
        """
        files = self._of(name).files
        assert files is not None
        return await in_thread(lambda: _piece(files, offset))

    async def drop(self, name: str) -> None:
        """Closes and forgets the environment `name`. Deletes its files if they are only stored on this node.

        Does nothing if there is no environment of this name.
        """
        hosted = self._hosted.pop(name, None)
        if hosted is None:
            return
        try:
            await hosted.environment.close()
        finally:
            if hosted.is_streamed and (files := hosted.files) is not None:
                await in_thread(lambda: shutil.rmtree(files.parent, ignore_errors=True))

    async def end(self) -> None:
        """Closes all environments, after which the host accepts no more calls."""
        if self._watching is not None:
            self._watching.cancel()
        await self._close_all()

    async def _close_all(self) -> None:
        self._has_ended = True
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(EpisodeStateError("the host has ended"))
        for work in self._work - {asyncio.current_task()}:
            work.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SEC):
                await asyncio.gather(*map(self.drop, [*self._hosted]), return_exceptions=True)
                for part in (self._source, self._containers):
                    if part is not None:
                        with suppress(Exception):
                            await part.close()
        if (folder := self._folder) is not None:
            await asyncio.to_thread(folder.remove)

    # News of the host

    async def news(self, wait_sec: float) -> tuple[float, list[News]]:
        """Waits until there is news for the run, such as a model request, for at most `wait_sec` seconds.

        Returns the duration of the wait in seconds, and the news, which can be empty.
        """
        started = time.monotonic()
        await happened(self._has_news, wait_sec)
        self._has_news.clear()
        found, self._untold, now = self._untold, [], time.monotonic()
        if now - self._reported_at > REPORTS_SEC:
            self._reported_at = now
            reports = {name: hosted.environment.report() for name, hosted in self._hosted.items()}
            found.append(News(None, "report", (reports,)))
        return now - started, found

    def _tell(self, method: str, *arguments: Any, number: int | None = None) -> None:
        self._untold.append(News(number, method, arguments))
        self._has_news.set()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        self._tell(method, *arguments, number=number)
        try:
            return (await waiting).result("the run's own process")
        except SystemExit as error:  # SystemExit would end this process
            raise RuntimeError(str(error)) from error
        finally:
            self._answers.pop(number, None)

    async def answer(self, number: int, outcome: Outcome) -> None:
        """Receives the run's result for a call that this host sent to the run as the `News` with this `number`."""
        waiting = self._answers.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)

    def client(self, key: str, spec: EpisodeSpec, files: Path | None) -> LLMClient:
        """Creates a client for an environment's own model `key`. The client sends its requests to the run."""
        return self._client("ask_model", next(self._numbers), self._name_of(files), key, spec)

    def background_client_of(self, name: str) -> LLMClient:
        """Creates a client through which the agent in environment `name` sends background requests to the run."""
        return self._client("background_request", name)

    def _client(self, method: str, *arguments: Any) -> LLMClient:
        async def ask(request: LLMRequest) -> LLMResponse:
            response: LLMResponse = await self._ask(method, *arguments, request)
            return response

        return ask

    async def read(self, files: Path) -> Sequence[Asked] | None:
        """Fetches the recorded calls of an environment's own models from the run; `None` if there is no record."""
        if (name := self._name_of(files)) is None:
            return None
        found: Sequence[Asked] | None = await self._ask("read_record", name)
        return found

    async def append(self, key: str, files: Path, asked: Asked) -> None:
        """Makes the run record a call to an environment's own model, even if the caller is cancelled."""
        if (name := self._name_of(files)) is not None:
            await finish(self._ask("append_record", name, key, asked))

    def tell_log(self, record: logging.LogRecord) -> None:
        """Sends a log record to the run, which logs it again. Can be called from any thread."""
        with suppress(RuntimeError):  # the loop and the host have ended
            if self._watching is not None:
                arguments = (record.name, record.levelno, record.getMessage())
                self._watching.get_loop().call_soon_threadsafe(self._tell, "log", *arguments)

    def _name_of(self, files: Path | None) -> str | None:
        names = (name for name, hosted in self._hosted.items() if files is not None and hosted.files == files)
        return next(names, None)

    def _of(self, name: str) -> _Hosted:
        if name not in self._hosted:
            raise EpisodeStateError(f"the host has no environment {name!r}: it was closed")
        return self._hosted[name]

    def _parts(self, sent: Mapping[str, Any]) -> EpisodeParts:
        assert self._containers is not None
        assert self._agents is not None
        return EpisodeParts(container_factory=self._containers, code_agent_factory=self._agents, **sent)


class HostProcess(EnvironmentHost):
    """The Ray actor, which is an environment host in its own process. It also sends its warnings to the run's log."""

    def __init__(self, lease_sec: float) -> None:
        """Creates the host. Ray calls this method before the host's event loop runs."""
        super().__init__(lease_sec, on_end=lambda: os._exit(0))
        handler = logging.Handler(logging.WARNING)
        handler.emit = self.tell_log  # type: ignore[method-assign]
        logging.getLogger("ares_exp").addHandler(handler)


def _sees(path: Path, content: str) -> bool:
    try:
        return path.read_text() == content
    except (OSError, ValueError):
        return False


def _has_files(files: Path | None) -> bool:
    return files is not None and files.is_dir() and any(files.iterdir())


def _piece(files: Path, offset: int) -> tuple[bytes, bool]:
    archive = files.with_name("files.tar")
    if offset == 0:
        with tarfile.open(archive, "w") as tar:
            tar.add(files, arcname=".")
    with archive.open("rb") as file:
        file.seek(offset)
        data = file.read(PIECE_BYTES)
        has_more = file.seek(0, io.SEEK_END) > offset + len(data)
    if not has_more:
        archive.unlink()
        shutil.rmtree(files, ignore_errors=True)
    return data, has_more
