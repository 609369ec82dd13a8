"""The container of a task with a compose file: its service `main`, and the other services."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Unpack

from ares_exp.containers.container import ContainerSpec, ExecOptions, ExecResult, ServiceContainer
from ares_exp.containers.docker.compose.project import ComposeProject
from ares_exp.containers.docker.compose.project_file import MAIN, is_closed
from ares_exp.containers.docker.compose.security_policy import check_file
from ares_exp.containers.docker.compose.tool import find_compose
from ares_exp.containers.docker.container import DockerOptions, EngineContainer
from ares_exp.containers.docker.container_lifetime import FirstProcess, why_it_stays
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.running import RunningContainer
from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.ownership import unique_name
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    EnvironmentStartTimeoutError,
    PreflightError,
    SnapshotUnsupportedError,
    UnsupportedTaskError,
)

_logger = logging.getLogger(__name__)

NO_SNAPSHOTS = "the services of its compose file have separate state"


def check_compose(spec: ContainerSpec, options: DockerOptions) -> list[str]:
    """Checks, before the start, that a task with a compose file can run. Returns warnings. Blocking.

    Raises `UnsupportedTaskError` if no compose program is installed, the file violates the security policy, or the task
    needs to switch networks between phases. Raises `TaskError` if the file is malformed.
    """
    assert spec.compose_file is not None
    try:
        find_compose()
    except PreflightError as error:
        raise UnsupportedTaskError(f"Task {spec.name} has several services ({spec.compose_file}). {error}") from error
    not_done = check_file(spec, options)
    if len({is_closed(policy, options) for policy in spec.networks}) > 1:
        raise UnsupportedTaskError(
            f"Task {spec.name} has a public network in one phase and a closed network in another, but "
            f"container=docker cannot switch the networks of several services ({spec.compose_file}). Run it "
            "with one network: container.network=no-network or container.network=public."
        )
    return not_done


class ComposeContainer(EngineContainer):
    """The service `main` of a compose project; a `ComposedContainer`."""

    def __init__(self, spec: ContainerSpec, options: DockerOptions) -> None:
        super().__init__(spec, options)
        self.project_name = unique_name(spec.name)
        self._project = ComposeProject(self.project_name, spec, options)
        self._services: dict[str, Service] = {}

    async def start(self) -> None:
        try:
            await super().start()
        except EnvironmentStartTimeoutError as error:
            if not self._project.unready:
                raise
            services = ", ".join(self._project.unready)
            raise EnvironmentStartTimeoutError(f"{error} Services that were not ready: {services}.") from error

    async def _start(self, engine: Engine) -> None:
        spec = self._spec
        if spec.changes is not None:
            raise ContainerStartError(f"The container of {spec.name} cannot start from a snapshot: {NO_SNAPSHOTS}.")
        await self._project.start(engine)
        main = self._project.containers[MAIN]
        found = await in_thread(lambda: engine.api.inspect_container(main), abandon=True)
        self.image = found["Config"]["Image"]
        self._first_process = await FirstProcess.attach(engine, main)
        await self._network.start(engine, main, neighbours=self._project.addresses)
        await self._open(engine, main)

    def service(self, name: str) -> ServiceContainer:
        engine, containers = self._engine, self._project.containers
        if engine is None or self._running is None or self._stopped:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        if name not in containers:
            known = ", ".join(sorted(containers))
            raise ContainerError(f"{self._spec.compose_file} has no service {name}. It has the services {known}.")
        if name not in self._services:
            self._services[name] = Service(engine, containers[name], name)
        return self._services[name]

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        raise SnapshotUnsupportedError(
            f"The container of {self._spec.name} cannot be captured: {NO_SNAPSHOTS}. Run this task with snapshot=none."
        )

    async def _remove(self, engine: Engine) -> None:
        await asyncio.gather(*(service.close() for service in self._services.values()))
        if problem := await self._project.remove(engine):
            _logger.warning("The compose project %s could not be removed completely: %s.", self._project.name, problem)
        for image in () if self._options.keep_image else sorted(self._project.built):
            removal = functools.partial(engine.api.remove_image, image)
            if problem := await in_thread(functools.partial(why_it_stays, removal), pool="removals"):
                _logger.info("The image %s was not removed: %s.", image, problem)
        self._project.built.clear()


class Service(RunningContainer):
    """A `ServiceContainer` of a compose project. Its first command opens its shells."""

    def __init__(self, engine: Engine, container: str, name: str) -> None:
        super().__init__(engine, container, what=f"service {name}", shell="sh -c")
        self._is_open = False
        self._opening = asyncio.Lock()

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        async with self._opening:
            if not self._is_open:
                try:
                    await self.open()
                except engine_errors() as error:
                    raise ContainerError(f"The {self._what} cannot run commands: {reason(error)}.") from error
                self._is_open = True
        return await super().exec(command, **options)

    async def stop(self) -> None:
        api = self._engine.api
        problem = await in_thread(lambda: why_it_stays(lambda: api.kill(self._container)), pool="removals")
        if problem and "is not running" not in problem:
            raise ContainerError(f"The {self._what} could not be stopped: {problem}.")
