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
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ares_exp.agents.code_agent import as_agent_factory, effective_agent
from ares_exp.cancellation import finish, happened, in_thread
from ares_exp.config.targets import instantiate_group
from ares_exp.containers.container import as_container_factory
from ares_exp.containers.ownership import OwnedDirectory, short_lived_directory
from ares_exp.environment import EnvironmentBase, MinimalEnvironment, PendingRequest, TimeStep, complete
from ares_exp.environments.episode_limits import limited
from ares_exp.environments.own_model import ModelsElsewhere
from ares_exp.environments.source import EpisodeParts, SourceBase, make_scored_source
from ares_exp.errors import ConfigError, EpisodeStateError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMClient
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.environment_responses import Asked
from ares_exp.runs.executors.executor import Recipe, versions_here
from ares_exp.runs.executors.remote_messages import Facts, Failure, News, result_or_failure, unless_failed

REPORTS_SEC = 1.0
"""Minimum interval, in seconds, between two transfers of the environments' reports to the run."""
CLOSE_SEC = 30.0
"""Maximum time, in seconds, for closing the environments of a host when the host ends."""
PIECE_BYTES = 64 * 1024
"""Maximum size of a piece of an archive of files, in bytes. Ray is slow for objects over 100 kB."""

logger = logging.getLogger(__name__)


class _Hosted(NamedTuple):
    """An environment in the host, and the directory for the files of its episode; `None` if no files are kept."""

    environment: EnvironmentBase
    files: Path | None


class EnvironmentHost(ModelsElsewhere):
    """Executes environments on a node. The run calls all methods through `call`, and all calls share one event loop.

    Attributes:
        shares_disk: Whether the node shares the run directory. If not, the run fetches the files of episodes.
    """

    def __init__(self, lease_sec: float, *, on_end: Callable[[], None] = lambda: None) -> None:
        """Creates a host without environments.

        Args:
            lease_sec: Number of seconds without a call from the run after which the host shuts down.
            on_end: Function that is called when the host has shut itself down.
        """
        self.shares_disk = True
        self._lease_sec = lease_sec
        self._on_end = on_end
        self._source: SourceBase | None = None
        self._factories: dict[str, Any] = {}  # arguments of `EpisodeParts`
        self._hosted: dict[str, _Hosted] = {}
        self._heard_at = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self._untold: list[News] = []
        self._has_news = asyncio.Event()
        self._reported_at = 0.0
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._folder: OwnedDirectory | None = None
        self._has_ended = False

    async def call(self, words: bytes) -> bytes:
        """Calls a method of this host, and renews the lease. `words` is the method's name and arguments, pickled.

        Returns the result or a `Failure`, pickled. This method pickles the data itself, because Ray transfers bytes
        faster than objects.
        """
        work = asyncio.current_task()
        assert work is not None
        self._work.add(work)
        try:
            self._renew_lease()
            method, arguments = pickle.loads(words)
            return pickle.dumps(await getattr(self, method)(*arguments))
        except (Exception, SystemExit) as error:  # the method failed, or its arguments or its result cannot be pickled
            return pickle.dumps(Failure.of(error))
        finally:
            self._work.discard(work)

    def _renew_lease(self) -> None:
        now = time.monotonic()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="lease")
            self._work.add(self._watching)
        elif now - self._heard_at > self._lease_sec or self._has_ended:
            raise EpisodeStateError("the host has ended, because it received no call from its run")
        self._heard_at = now

    async def _watch(self) -> None:
        """Closes all environments and ends the host when the run has not called it for `lease_sec` seconds."""
        left = self._lease_sec
        while left > 0:
            await asyncio.sleep(left)
            left = self._heard_at + self._lease_sec - time.monotonic()
        logger.warning("The run sent no call for %g s. Its environments on this node are closed.", self._lease_sec)
        try:
            await self.end()
        finally:
            self._on_end()

    async def prepare(
        self, recipe: Recipe, digests: Mapping[str, str | None], parts: EpisodeParts, seen_file: Path | None
    ) -> tuple[list[str], bool]:
        """Creates the factories and the task set, and checks that this node can run the tasks.

        Args:
            recipe: Recipe from which the host creates the components of environments.
            digests: Digest of the content of each task of the run, by name; `None` for an unknown digest.
            parts: Arguments of environments that all episodes have in common, without factories.
            seen_file: File in the run directory. If this node cannot read it, or if it is `None`, the run fetches the
                files of episodes from this node.

        Returns:
            Warnings for the user, and whether this node shares the run directory.

        Raises:
            UserError: The node cannot run the tasks, or its versions or task files differ from the run.
        """
        both = [(name, here, recipe.versions.get(name)) for name, here in versions_here().items()]
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
        agents = effective_agent(agents, runs_solutions=parts.provide_solution)
        containers = as_container_factory(await asyncio.to_thread(instantiate_group, config, "container"))
        self._factories = {"container_factory": containers, "code_agent_factory": agents}
        names = await asyncio.to_thread(source.load, warnings.append)
        if missing := digests.keys() - names:
            raise ConfigError(f"This node lacks the run's task {min(missing)!r:.100}. Copy all tasks to every node.")
        source.keep(list(digests))
        self._source = source
        for model in source.own_models:
            model.ask_elsewhere(self)
        await source.preflight()
        if source.needs_container:
            await containers.preflight()
            await agents.preflight()
        await asyncio.to_thread(source.check, replace(parts, **self._factories), report=warnings.append)
        found = await asyncio.to_thread(lambda: {name: source.digest(name) for name in digests})
        if changed := [name for name, digest in digests.items() if found[name] != digest]:
            raise ConfigError(f"The files of task {changed[0]!r:.100} on this node differ from the files of the run.")
        self._folder = await asyncio.to_thread(short_lived_directory, "host")
        self.shares_disk = seen_file is not None and await asyncio.to_thread(os.access, seen_file, os.R_OK)
        return warnings, self.shares_disk

    # Environments

    def _make(self, name: str, task_name: str, parts: EpisodeParts, has_background_requests: bool) -> None:
        assert self._source is not None, "prepare() comes first"
        parts = replace(parts, **self._factories)
        if not self.shares_disk and parts.output_dir is not None:
            assert self._folder is not None
            parts = replace(parts, output_dir=self._folder.path / name / "files")
        if has_background_requests:
            parts = replace(parts, background_client=self.background_client_of(name))
        environment = limited(self._source.make(task_name, parts), parts.limits)
        self.adopt(name, environment, files=parts.output_dir)

    def adopt(self, name: str, environment: MinimalEnvironment, *, files: Path | None = None) -> None:
        """Adds an existing environment, which the run can call by its `name` and which is closed when the host ends."""
        self._hosted[name] = _Hosted(complete(environment), files)

    async def act(
        self, name: str, method: str, arguments: Mapping[str, Any], made_from: tuple[Any, ...] = ()
    ) -> tuple[Any, Facts]:
        """Calls the method `reset`, `step`, `truncate`, `export_state` or `close` of the environment `name`.

        If the environment does not exist, first creates it with the arguments `made_from` of `_make`. Returns the
        result of the call, which can be a `Failure`, and the state of the environment after the call.
        """
        if name not in self._hosted:
            if method == "close":
                return None, Facts()
            if made_from:
                self._make(name, *made_from)
        environment, files = self._of(name)
        if method == "export_state" and not self.shares_disk:
            raise SnapshotUnsupportedError(
                "Snapshots are written on the node, which cannot access the run directory. Put the run directory on a "
                "disk that all nodes share, or set `snapshot=none`."
            )
        result = await result_or_failure(getattr(environment, method), **arguments)
        if method == "export_state" and not isinstance(result, Failure):
            result = result.snapshot_dir
        elif result is not None and not isinstance(result, Failure):
            result = TimeStep(result.step_type, result.reward, result.discount, result.observation)
        step_type = environment.time_step.step_type if environment.time_step is not None else None
        may_have_files = not self.shares_disk and step_type in (None, "LAST")
        facts = Facts(
            report=environment.report(),
            step_type=step_type,
            step_count=environment.step_count,
            time_left_sec=environment.time_left_sec,
            activity=environment.activity,
            pending=tuple(environment.pending_requests()),
            past=tuple(environment.past_steps) if method == "reset" else (),
            has_files=may_have_files and await asyncio.to_thread(_has_files, files),
        )
        if method == "close" and not facts.has_files:
            await self.drop(name)
        return result, facts

    async def changed(self, name: str, known: Sequence[int]) -> tuple[PendingRequest, ...]:
        """Waits until the ids of the environment's pending requests differ from `known`, and returns the requests."""
        stand_ins = [PendingRequest(call_id, "", None) for call_id in known]
        return tuple(await self._of(name).environment.changed_requests(stand_ins))

    async def grant(self, name: str, seconds: float) -> None:
        """Extends the time limit of an environment."""
        self._of(name).environment.grant_time(seconds)

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
            if not self.shares_disk and (files := hosted.files) is not None:
                await in_thread(lambda: shutil.rmtree(files.parent, ignore_errors=True))

    async def end(self) -> None:
        """Closes all environments, after which the host accepts no more calls."""
        self._has_ended = True
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(EpisodeStateError("the host has ended"))
        for work in self._work - {asyncio.current_task()}:
            work.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SEC):
                await asyncio.gather(*map(self.drop, [*self._hosted]), return_exceptions=True)
                for part in (self._source, self._factories.get("container_factory")):
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
            found.append((None, "report", (reports,)))
        return now - started, found

    def _tell(self, number: int | None, method: str, *arguments: Any) -> None:
        self._untold.append((number, method, arguments))
        self._has_news.set()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        self._tell(number, method, *arguments)
        try:
            return unless_failed(await waiting, "the run's own process")
        except asyncio.CancelledError:
            self._tell(None, "cancel", number)
            raise
        except SystemExit as error:  # SystemExit would end this process
            raise RuntimeError(str(error)) from error
        finally:
            self._answers.pop(number, None)

    async def answer(self, number: int, result: Any) -> None:
        """Receives the run's result, which can be a `Failure`, for the news with this number."""
        waiting = self._answers.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)

    def client(self, key: str, spec: EpisodeSpec, files: Path | None) -> LLMClient:
        """Creates a client for an environment's own model `key`. The client sends its requests to the run."""
        return partial(self._ask, "ask_model", next(self._numbers), self._name_of(files), key, spec)

    def background_client_of(self, name: str) -> LLMClient:
        """Creates a client through which the agent in environment `name` sends background requests to the run."""
        return partial(self._ask, "background_request", name)

    async def read(self, files: Path) -> Sequence[Asked] | None:
        """Fetches the recorded calls of an environment's own models from the run; `None` if there is no record."""
        if (name := self._name_of(files)) is None:
            return None
        found: Sequence[Asked] | None = await self._ask("read_record", name)
        return found

    async def append(self, key: str, files: Path, asked: Asked) -> None:
        """Makes the run record a call to an environment's own model, even if the caller is cancelled."""
        if (name := self._name_of(files)) is not None:
            recording = asyncio.ensure_future(self._ask("append_record", name, key, asked))
            recording.add_done_callback(lambda done: done.cancelled() or done.exception())
            await finish(asyncio.wait({recording}))
            await recording

    def tell_log(self, record: logging.LogRecord) -> None:
        """Sends a log record to the run, which logs it again. Can be called from any thread."""
        with suppress(RuntimeError):  # the loop and the host have ended
            if self._watching is not None:
                arguments = (record.name, record.levelno, record.getMessage())
                self._watching.get_loop().call_soon_threadsafe(self._tell, None, "log", *arguments)

    def _name_of(self, files: Path | None) -> str | None:
        names = (name for name, hosted in self._hosted.items() if files is not None and hosted.files == files)
        return next(names, None)

    def _of(self, name: str) -> _Hosted:
        if name not in self._hosted:
            raise EpisodeStateError(f"the host has no environment {name!r}: it was closed")
        return self._hosted[name]


class HostProcess(EnvironmentHost):
    """The Ray actor, which is an environment host in its own process. It also sends its warnings to the run's log."""

    def __init__(self, lease_sec: float) -> None:
        """Creates the host. Ray calls this method before the host's event loop runs."""
        super().__init__(lease_sec, on_end=lambda: os._exit(0))
        handler = logging.Handler(logging.WARNING)
        handler.emit = self.tell_log  # type: ignore[method-assign]
        logging.getLogger("ares_exp").addHandler(handler)


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
