"""The environment host, which serves environments on one node to the run through messages. It does not depend on Ray.

The run sends messages, and the host replies. Questions and news of the host (requests to a model, records, warnings)
wait until the run asks for news, so that only the run opens connections. If the host receives no message for the time
of its lease, it closes its environments and ends.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import platform
import shutil
import socket
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from ares_exp import __version__
from ares_exp.agents.code_agent import AgentFactoryBase, as_agent_factory, effective_agent
from ares_exp.cancellation import finish, in_thread
from ares_exp.config.targets import instantiate_group
from ares_exp.containers.container import ContainerFactoryBase, as_container_factory
from ares_exp.containers.ownership import OwnedDirectory, short_lived_directory
from ares_exp.environment import EnvironmentBase, EpisodeReport, MinimalEnvironment, PendingRequest, complete
from ares_exp.environments.episode_limits import limited
from ares_exp.environments.own_model import ModelsElsewhere
from ares_exp.environments.source import EpisodeParts, SourceBase, make_scored_source
from ares_exp.errors import ConfigError, EpisodeStateError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.environment_responses import Asked
from ares_exp.runs.executors.executor import Recipe
from ares_exp.runs.executors.host_calls import CALL_BYTES, HostCalls, Method, failed
from ares_exp.runs.executors.remote_messages import (
    AppendRecord,
    AskModel,
    Bases,
    ClientOfModel,
    EnvironmentOrder,
    Facts,
    Failure,
    Logged,
    News,
    Question,
    ReadRecord,
    Reply,
    Reported,
    RequestEncoder,
    RespondInBackground,
    coded_step,
)

EXPIRED_SEC = 0.05
"""Delay between the end of a host's lease and the end of the host, in seconds."""
REPORTS_SEC = 1.0
"""Minimum interval between two updates of the reports of busy environments, in seconds."""
CLOSE_SEC = 30.0
"""Time limit for closing the environments of a host before it ends, in seconds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostOrder:
    """The order to prepare a host for a run.

    Attributes:
        recipe: Recipe from which environments are created.
        task_names: Names of the tasks of the run.
        digests: Digest of each task's content; `None` for an unknown digest.
        parts: Parts of any episode, without the factories.
        versions: Versions of the run's software, by name.
        seen_file: Path and content of a file in the run directory, with which the host detects a shared disk. `None`
            skips this check.
    """

    recipe: Recipe
    task_names: tuple[str, ...]
    digests: Mapping[str, str | None]
    parts: Mapping[str, Any]
    versions: Mapping[str, str]
    seen_file: tuple[Path, str] | None = None


@dataclass(frozen=True, slots=True)
class HostReady:
    """The reply of a host that is ready.

    Attributes:
        hostname: Hostname of the node.
        pid: Process id of the host.
        warnings: Warnings for the user.
        shares_disk: Whether the host can access the run directory.
    """

    hostname: str
    pid: int
    warnings: tuple[str, ...]
    shares_disk: bool


def versions_here() -> dict[str, str]:
    """Returns the versions that must be equal in a run and its hosts."""
    return {"ares_exp": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}


def parts_to_send(parts: EpisodeParts) -> dict[str, Any]:
    """Returns the parts of an episode that are sent to a host. The host has its own factories."""
    names = ("limits", "seed", "provide_solution", "start_from", "episode_id", "attempt", "output_dir")
    return {name: getattr(parts, name) for name in names}


@dataclass(slots=True)
class _Hosted:
    """An environment in the host, with its state.

    Attributes:
        environment: The environment.
        encoder: Encoder of the environment's requests.
        files: Directory for the files of the episode; `None` if no files are kept.
        is_streamed: Whether `files` is a directory of this host, which the run fetches.
        is_fetched: Whether the run has fetched the files.
        told: Report that was last sent to the run as news.
        replied: Report of the last reply, and the number of different reports before it.
        calls: Number of calls in progress.
    """

    environment: EnvironmentBase
    encoder: RequestEncoder
    files: Path | None = None
    is_streamed: bool = False
    is_fetched: bool = False
    told: EpisodeReport | None = None
    replied: tuple[EpisodeReport | None, int] = (None, 0)
    calls: int = 0


class EnvironmentHost(ModelsElsewhere):
    """Environments by id, on the event loop of the first call. Methods named after a message handle this message."""

    def __init__(self, *, lease_sec: float, on_end: Callable[[], None] = lambda: None) -> None:
        """Creates a host without environments.

        Args:
            lease_sec: Time without a message of the run after which the host ends, in seconds.
            on_end: Function that is called when the host has ended by itself.
        """
        self._lease_sec = lease_sec
        self._on_end = on_end
        self._source: SourceBase | None = None
        self._containers: ContainerFactoryBase | None = None
        self._agents: AgentFactoryBase | None = None
        self._hosted: dict[str, _Hosted] = {}
        self._heard_at = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reported_at = 0.0
        self._questions = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._clients = count()
        self._waits: dict[int, tuple[str | None, Callable[[float], None]]] = {}
        self._folder: OwnedDirectory | None = None
        self._making_folder = threading.Lock()
        self._has_ended = False
        self._ending: asyncio.Task[None] | None = None
        methods: Sequence[Method] = (
            *(self.prepare, self.act, self.changed, self.grant, self.fork, self.fetch, self.drop),
            *(self.cancel, self.answer, self.waited, self.end),
        )
        self._calls = HostCalls({method.__name__: method for method in methods})

    async def handle(self, call: bytes) -> bytes:
        """Handles a call of the run and returns its reply. Repeated calls are handled only once (see `HostCalls`)."""
        number, arrived, wait_sec, messages = pickle.loads(call)
        try:
            self._hear()
        except EpisodeStateError as error:
            return failed(error)
        if wait_sec is not None:
            self._tell_new_reports()
        return await self._calls.take(number, arrived, wait_sec, messages)

    def _hear(self) -> None:
        """Renews the lease.

        Raises:
            EpisodeStateError: The lease has expired, or the host has ended.
        """
        now = time.monotonic()
        if self._watching is None:
            self._loop = asyncio.get_running_loop()
            self._watching = asyncio.create_task(self._watch(), name="lease")
        elif now - self._heard_at > self._lease_sec or self._has_ended:
            self._end_by_itself()
            raise EpisodeStateError("the host has ended, because it received no message from its run")
        self._heard_at = now

    async def _watch(self) -> None:
        while not self._has_ended:
            left = self._heard_at + self._lease_sec - time.monotonic()
            if left < 0:
                self._end_by_itself()
            else:
                await asyncio.sleep(left + EXPIRED_SEC)

    def _end_by_itself(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            logger.warning(
                "The run sent no message for %g s. Its environments on this node are closed.", self._lease_sec
            )
            self._ending = asyncio.create_task(self._close_all())
            self._ending.add_done_callback(lambda _: self._on_end())

    # Messages of the run

    async def prepare(self, order: HostOrder) -> HostReady:
        """Creates the parts, and checks that the tasks can be run here.

        Raises:
            UserError: The tasks cannot be run here, or versions or tasks differ from the run's.
        """
        different = {name: (here, order.versions.get(name)) for name, here in versions_here().items()}
        if told := [f"{name} {here} and not {run}" for name, (here, run) in different.items() if here != run]:
            raise ConfigError(f"Expected the same versions as the run, but this node has {', '.join(told)}.")
        _move_to(order.recipe)
        warnings: list[str] = []
        from omegaconf import OmegaConf

        config = OmegaConf.create(dict(order.recipe.nodes))
        source = await asyncio.to_thread(make_scored_source, config)
        agents = as_agent_factory(await asyncio.to_thread(instantiate_group, config, "agent"))
        self._agents = effective_agent(agents, runs_solutions=order.parts["provide_solution"])
        self._containers = as_container_factory(await asyncio.to_thread(instantiate_group, config, "container"))
        names = await asyncio.to_thread(source.load, warnings.append)
        if missing := [name for name in order.task_names if name not in names]:
            raise ConfigError(f"Expected the tasks of the run, but {missing[0]!r:.100} is missing.")
        source.keep(order.task_names)
        self._source = source
        for model in source.own_models:
            model.ask_elsewhere(self)
        await source.preflight()
        if source.needs_container:
            await self._containers.preflight()
            await self._agents.preflight()
        await asyncio.to_thread(source.check, self._parts(order.parts), report=warnings.append)
        found = await asyncio.to_thread(lambda: {name: source.digest(name) for name in order.task_names})
        if changed := [name for name, digest in order.digests.items() if found[name] != digest]:
            raise ConfigError(f"Expected the tasks of the run, but the files of {changed[0]!r:.100} are different.")
        shares_disk = order.seen_file is not None and await asyncio.to_thread(_sees, *order.seen_file)
        return HostReady(socket.gethostname(), os.getpid(), tuple(warnings), shares_disk)

    async def _make(self, name: str, order: EnvironmentOrder) -> None:
        """Creates an environment with this name, without starting it."""
        assert self._source is not None, "prepare() comes first"
        made = self._parts(order.parts)
        if order.streams and made.output_dir is not None:
            made = replace(made, output_dir=await asyncio.to_thread(self._new_folder))
        if order.has_background_requests:
            made = replace(made, background_client=self.background_client_of(name))
        environment = self._source.make(order.task_name, made)
        self.adopt(name, limited(environment, made.limits), files=made.output_dir, is_streamed=order.streams)

    def adopt(
        self, name: str, environment: MinimalEnvironment, *, files: Path | None = None, is_streamed: bool = False
    ) -> None:
        """Adds an existing environment, which is closed with this host at the latest."""
        self._hosted[name] = _Hosted(complete(environment), RequestEncoder(), files, is_streamed)

    async def act(
        self,
        name: str,
        method: str,
        arguments: Mapping[str, Any],
        bases: Bases,
        known_report: int = 0,
        order: EnvironmentOrder | None = None,
    ) -> Reply:
        """Calls an environment: `reset`, `step`, `truncate`, `export_state` or `close`.

        Args:
            name: Name of the environment.
            method: Name of the method.
            arguments: Arguments of the method.
            bases: Latest requests that the run has.
            known_report: Number of the latest report that the run has.
            order: Order from which the environment is created if it does not exist yet.
        """
        if name not in self._hosted and method == "close":
            return Reply()
        if name not in self._hosted and order is not None:
            await self._make(name, order)
        hosted = self._of(name)
        hosted.encoder.acknowledge(bases)
        hosted.is_fetched = hosted.is_fetched and method == "close"
        acts: Mapping[str, Method] = {
            "reset": hosted.environment.reset,
            "step": hosted.environment.step,
            "truncate": hosted.environment.truncate,
            "export_state": hosted.environment.export_state,
            "close": hosted.environment.close,
        }
        if method == "export_state" and hosted.is_streamed:
            raise SnapshotUnsupportedError(
                "Snapshots are written on the node, which cannot see the run directory. Put the run directory on a "
                "disk that all nodes share, or set `snapshot=none`."
            )
        hosted.calls += 1
        value: Any = None
        failure: Failure | None = None
        try:
            value = await acts[method](**arguments)
        except (Exception, SystemExit) as error:
            failure = Failure.of(error)
        finally:
            hosted.calls -= 1
        if method == "export_state" and value is not None:
            value = value.snapshot_dir
        elif value is not None:
            value = coded_step(value, lambda observation: hosted.encoder.encode(observation, bases))
        facts = await self._facts(hosted, bases, known_report, starts=method == "reset")
        if method == "close" and not facts.has_files:
            await self.drop(name)
        return Reply(value, failure, facts)

    async def _facts(self, hosted: _Hosted, bases: Bases, known_report: int = 0, *, starts: bool = False) -> Facts:
        environment, encoder = hosted.environment, hosted.encoder
        (before, number), report = hosted.replied, environment.report()
        if report != before:
            number += 1
        hosted.told, hosted.replied = report, (report, number)
        past = environment.past_steps if starts else ()
        step_type = environment.time_step.step_type if environment.time_step is not None else None
        may_have_files = step_type in (None, "LAST") and hosted.is_streamed and not hosted.is_fetched
        return Facts(
            report=report if number != known_report else None,
            report_number=number,
            step_count=environment.step_count,
            has_started=True,
            step_type=step_type,
            time_left_sec=environment.time_left_sec,
            activity=environment.activity,
            pending=self._pending(hosted, environment.pending_requests(), bases),
            keeps_past=bool(past),
            past=encoder.encode_past(past[:-1]),
            has_files=may_have_files and await asyncio.to_thread(_has_files, hosted.files),
        )

    @staticmethod
    def _pending(hosted: _Hosted, pending: Sequence[PendingRequest], bases: Bases) -> tuple[PendingRequest, ...]:
        return tuple(one._replace(request=hosted.encoder.encode(one.request, bases)) for one in pending)

    async def changed(
        self, name: str, known: Sequence[int], bases: Bases, wait_sec: float
    ) -> tuple[PendingRequest, ...] | None:
        """Waits until the pending requests of an environment differ from `known`; `None` after the time limit."""
        hosted = self._of(name)
        stand_ins = [PendingRequest(call_id, "", None) for call_id in known]
        try:
            async with asyncio.timeout(wait_sec):
                pending = await hosted.environment.changed_requests(stand_ins)
        except TimeoutError:
            return None
        return self._pending(hosted, pending, bases)

    async def grant(self, name: str, seconds: float) -> None:
        """Extends the time limit of an environment."""
        if name in self._hosted:
            self._hosted[name].environment.grant_time(seconds)

    async def fork(self, name: str, forks: Sequence[str], diversify: bool) -> list[Facts]:
        """Creates environments with these names that continue from the current state of `name`."""
        made = await self._of(name).environment.fork(len(forks), diversify=diversify)
        for fork, environment in zip(forks, made, strict=True):
            self.adopt(fork, environment)
        return [await self._facts(self._hosted[fork], {}) for fork in forks]

    async def fetch(self, name: str, offset: int) -> tuple[bytes, bool]:
        """Returns a piece of the archive of an episode's files, from a byte offset, and whether more data follows."""
        hosted = self._of(name)
        assert hosted.files is not None
        data, has_more = await asyncio.to_thread(_piece, hosted.files, offset)
        hosted.is_fetched = not has_more
        return data, has_more

    async def drop(self, name: str) -> None:
        """Closes an environment, and removes it and its files. Does nothing for an unknown name."""
        hosted = self._hosted.pop(name, None)
        if hosted is None:
            return
        self._waits = {number: one for number, one in self._waits.items() if one[0] != name}
        try:
            await hosted.environment.close()
        finally:
            if hosted.is_streamed and (files := hosted.files) is not None:
                await in_thread(lambda: _remove_files(files))

    async def cancel(self, number: int) -> None:
        """Cancels the handling of a message, and returns when it has ended."""
        await self._calls.cancel(number)

    def _tell_new_reports(self) -> None:
        """Sends the changed reports of busy environments to the run, at most every `REPORTS_SEC`."""
        if time.monotonic() - self._reported_at < REPORTS_SEC:
            return
        self._reported_at = time.monotonic()
        for name, hosted in self._hosted.items():
            if hosted.calls and _shown(report := hosted.environment.report()) != _shown(hosted.told):
                hosted.told = report
                self.tell(Reported(name, report))

    async def answer(self, number: int, value: Any, failure: Failure | None) -> None:
        """Receives the answer to a question of the host."""
        waiting = self._answers.pop(number, None)
        if waiting is not None and not waiting.done():
            if failure is None:
                waiting.set_result(value)
            else:
                error = failure.error("the run's own process")
                waiting.set_exception(error if isinstance(error, Exception) else RuntimeError(failure.message))

    async def waited(self, client: int, seconds: float) -> None:
        """Reports time that a model's client waited for something other than its response."""
        if client in self._waits:
            self._waits[client][1](seconds)

    async def end(self) -> None:
        """Closes all environments and ends the host."""
        self._has_ended = True
        await self._close_all()

    async def _close_all(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(EpisodeStateError("the host has ended"))
        for work in self._calls.work:
            if work is not asyncio.current_task():
                work.cancel()
        names = [*self._hosted]
        drops = [asyncio.ensure_future(self.drop(name)) for name in names]
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SEC):
                await asyncio.gather(*drops, return_exceptions=True)
                for part in (self._source, self._containers):
                    if part is not None:
                        with suppress(Exception):
                            await part.close()
        if (folder := self._folder) is not None:
            await asyncio.to_thread(folder.remove)

    # Questions and news of the host

    def client(self, key: str, spec: EpisodeSpec, files: Path | None) -> LLMClient:
        """Creates a client that sends its requests through the run to the model at `key`."""
        number = next(self._clients)
        of = ClientOfModel(number, key, self._name_of(files), spec.task_name, spec.attempt, spec.seed)
        if spec.on_wait is not None:
            self._waits[number] = of.environment, spec.on_wait

        async def ask(request: LLMRequest) -> LLMResponse:
            answer: LLMResponse = await self._ask(lambda question: AskModel(question, of, request))
            return answer

        return ask

    def background_client_of(self, name: str) -> LLMClient:
        """Creates a client that sends the background requests of an environment to the run."""

        async def ask(request: LLMRequest) -> LLMResponse:
            answer: LLMResponse = await self._ask(lambda question: RespondInBackground(question, name, request))
            return answer

        return ask

    async def read(self, files: Path) -> Sequence[Asked] | None:
        """Requests the record of an episode's questions from the run."""
        if (name := self._name_of(files)) is None:
            return None
        found: Sequence[Asked] | None = await self._ask(lambda question: ReadRecord(question, name))
        return found

    async def append(self, key: str, files: Path, asked: Asked) -> None:
        """Sends a question to the run's record, even if the caller is cancelled, because the question is paid for."""
        if (name := self._name_of(files)) is not None:
            await finish(self._ask(lambda question: AppendRecord(question, name, key, asked)))

    def tell(self, news: News) -> None:
        """Sends news to the run as soon as it asks for news."""
        self._calls.tell(news)

    def tell_log(self, record: logging.LogRecord) -> None:
        """Sends a log record to the run. Can be called from any thread."""
        told = Logged(record.name, record.levelno, record.getMessage())
        with suppress(RuntimeError):  # the loop and the host have ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.tell, told)

    async def _ask(self, question: Callable[[int], Question]) -> Any:
        number = next(self._questions)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        self.tell(question(number))
        try:
            return await waiting
        finally:
            self._answers.pop(number, None)

    def _name_of(self, files: Path | None) -> str | None:
        """Returns the name of the environment whose files are in this directory; `None` if unknown."""
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

    def _new_folder(self) -> Path:
        with self._making_folder:
            if self._folder is None:
                self._folder = short_lived_directory("host")
        return Path(tempfile.mkdtemp(dir=self._folder.path)) / "files"


def _move_to(recipe: Recipe) -> None:
    """Uses the run's working directory and module search path, for relative paths and the user's modules."""
    if recipe.cwd.is_dir():
        os.chdir(recipe.cwd)
    sys.path += [entry for entry in recipe.search_path if entry not in sys.path]


def _sees(path: Path, content: str) -> bool:
    try:
        return path.read_text() == content
    except (OSError, ValueError):
        return False


def _shown(report: EpisodeReport | None) -> tuple[Any, ...]:
    """Returns the parts of a report that are shown while its environment is busy."""
    if report is None:
        return ()
    return report.phase, report.has_container, report.container_image, report.environment_usage


def _has_files(files: Path | None) -> bool:
    return files is not None and files.is_dir() and any(files.iterdir())


def _archive_of(files: Path) -> Path:
    return files.with_name("files.tar")


def _piece(files: Path, offset: int) -> tuple[bytes, bool]:
    """Returns a piece of the archive of a directory. Offset 0 creates the archive. Blocking."""
    archive = _archive_of(files)
    if offset == 0:
        with tarfile.open(archive, "w") as tar:
            tar.add(files, arcname=".")
    with archive.open("rb") as file:
        file.seek(offset)
        data = file.read(CALL_BYTES)
        has_more = bool(data) and file.seek(0, io.SEEK_END) > offset + len(data)
    if not has_more:
        archive.unlink(missing_ok=True)
    return data, has_more


def _remove_files(files: Path) -> None:
    shutil.rmtree(files.parent, ignore_errors=True)
