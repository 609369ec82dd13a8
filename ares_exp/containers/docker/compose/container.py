"""The container of a task with a compose file: its service `main`, the other services, and their compose project."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ares_exp import cancellation
from ares_exp.containers.container import ContainerSpec, ExecOptions, ExecResult, ServiceContainer
from ares_exp.containers.docker.compose.project_file import MAIN, base_document, complete, is_closed, literal, names_of
from ares_exp.containers.docker.compose.security_policy import check_file, refuse_violations
from ares_exp.containers.docker.compose.tool import ComposeTool, complaint, find_compose, variables
from ares_exp.containers.docker.container import DockerOptions, EngineContainer
from ares_exp.containers.docker.container_lifetime import FirstProcess, starts, why_it_stays
from ares_exp.containers.docker.docker_cli import passed_on
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.image import ensure_image, image_tag, inspect_image
from ares_exp.containers.docker.leftovers import find_labelled, image_labels, watch_over_us
from ares_exp.containers.docker.running import RunningContainer
from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.ownership import unique_name, working_directory
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    EnvironmentStartTimeoutError,
    PreflightError,
    SnapshotUnsupportedError,
    UnsupportedTaskError,
)

if TYPE_CHECKING:
    from docker import APIClient

_logger = logging.getLogger(__name__)

NO_SNAPSHOTS = "the services of its compose file have separate state"


def check_compose(spec: ContainerSpec, options: DockerOptions) -> list[str]:
    """Checks, before the start, that a task with a compose file can run. Returns warnings. Blocking.

    Raises `UnsupportedTaskError` if no compose program is installed, if the file violates the security policy, or if
    only some phases of the task have a public network. Raises `TaskError` if the file is malformed.
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


_POLL_SEC = 0.1
_LAST_LINES = 20
_LAST_BYTES = 4096

PROJECT = "com.docker.compose.project"
"""Name of the label on all resources of a project. The label's value is the project's name."""

APPEARS_WITHIN_SEC = 2.0
"""Seconds in which the engine may still create resources for earlier requests of a killed compose program."""

SERVICE = "com.docker.compose.service"
"""Name of the label that contains the name of a container's service."""


class ComposeContainer(EngineContainer):
    """The service `main` of a compose project, in which the agent works. It is a `ComposedContainer`.

    The project has the containers, networks and volumes of one attempt at a task. All their names start with
    `project_name`.
    """

    def __init__(self, spec: ContainerSpec, options: DockerOptions) -> None:
        super().__init__(spec, options)
        assert spec.compose_file is not None
        self.project_name = unique_name(spec.name)
        self._file = spec.compose_file
        self._containers: dict[str, str] = {}  # the name of one container per service
        self._services: dict[str, Service] = {}
        self._built: set[str] = set()  # names of images
        self._unready: list[str] = []  # names of the services that were not ready when the start failed
        self._exists = False
        self._may_grow = False

    async def start(self) -> None:
        try:
            await super().start()
        except EnvironmentStartTimeoutError as error:
            if not self._unready:
                raise
            services = ", ".join(self._unready)
            raise EnvironmentStartTimeoutError(f"{error} Services that were not ready: {services}.") from error

    async def _start(self, engine: Engine) -> None:
        spec = self._spec
        if spec.changes is not None:
            raise ContainerStartError(f"The container of {spec.name} cannot start from a snapshot: {NO_SNAPSHOTS}.")
        addresses = await self._start_project(engine)
        main = self._containers[MAIN]
        found = await in_thread(lambda: engine.api.inspect_container(main), abandon=True)
        self.image = found["Config"]["Image"]
        self._first_process = await FirstProcess.attach(engine, main)
        await self._network.start(engine, main, neighbours=addresses)
        await self._open(engine, main)

    async def _start_project(self, engine: Engine) -> list[str]:
        """Builds or pulls the images, starts the services, and waits until they are ready. Returns their host names.

        Raises `ContainerStartError` if a service or the compose program fails, and `UnsupportedTaskError` or another
        `TaskError` if the file cannot be used.
        """
        tool = await asyncio.to_thread(find_compose)
        await asyncio.to_thread(check_file, self._spec, self._options)
        env = await asyncio.to_thread(variables, self._spec, engine.host)
        document = await self._read(tool, env)
        await asyncio.to_thread(refuse_violations, self._file, document, self._options)
        image_of = await self._make_images(engine, tool, document["services"])
        whole = complete(document, self._spec, self._options, image_of, engine.capabilities)
        async with starts(engine):
            await cancellation.in_thread(lambda: watch_over_us(engine))
            self._exists = self._may_grow = True
            answer = await tool.run(
                [*self._arguments(), "-f", "-", "up", "-d"],
                env=env,
                directory=self._file.parent,
                stdin=json.dumps(whole, default=str).encode(),
            )
            self._may_grow = False
        if answer.exit_code != 0:
            await is_ready(engine, self.project_name)
            raise ContainerStartError(f"`{' '.join(tool.command)} up` failed:\n{complaint(answer)}")
        while not await is_ready(engine, self.project_name):  # noqa: ASYNC110 (polls the engine; the caller bounds it)
            await asyncio.sleep(_POLL_SEC)
        found = await in_thread(lambda: containers_of(engine.api, self.project_name), abandon=True)
        names = [(one["Labels"].get(SERVICE), one["Names"][0].lstrip("/")) for one in found]
        self._containers = dict(sorted(names, reverse=True))
        return names_of(document)

    def _arguments(self) -> list[str]:
        return ["--ansi", "never", "-p", self.project_name, "--project-directory", str(self._file.parent)]

    async def _read(self, tool: ComposeTool, env: Mapping[str, str]) -> dict[str, Any]:
        """Runs the compose program to merge the task's file on top of `base_document`, and returns the merged document.

        The result has substituted variables and includes the files that the task's file refers to.
        """
        async with working_directory("build") as folder:
            base = folder / "base.json"
            await asyncio.to_thread(lambda: base.write_text(json.dumps(base_document(self._spec)), encoding="utf-8"))
            arguments = [*self._arguments(), "-f", str(base), "-f", str(self._file), "config"]
            arguments += ["--format", "json"] if tool.says_json else []
            answer = await tool.run(arguments, env=env, directory=self._file.parent)
        if answer.exit_code != 0:
            raise UnsupportedTaskError(
                f"{self._file}: Docker Compose {tool.version} rejects this file: {complaint(answer)}"
            )
        document = await asyncio.to_thread(_parse, answer.output)
        if not tool.says_json:  # version 1 also prints services of inactive profiles
            document["services"] = {name: one for name, one in document["services"].items() if not one.get("profiles")}
        return document

    async def _make_images(
        self, engine: Engine, tool: ComposeTool, services: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, str]:
        images, renamed = dict[str, str](), dict[str, str]()
        for name, service in services.items():
            if service.get("build"):
                images[name] = renamed[str(service.get("image"))] = await self._build(
                    engine, tool, name, service["build"]
                )
                self._built.add(images[name])
        for name, service in services.items():
            if name in images:
                continue
            if not (image := str(service.get("image") or "")):
                raise ContainerStartError(f"Service {name} of task {self._spec.name} has neither `image` nor `build`.")
            images[name] = renamed.get(image, image.replace("$$", "$"))
            await ensure_image(engine, name=self._spec.name, docker_image=images[name], context_dir=None)
        return images

    async def _build(self, engine: Engine, tool: ComposeTool, name: str, build: Mapping[str, Any]) -> str:
        """Builds the image of the service `name`, unless the engine already has it. Returns the name of the image."""
        task, keep, folder = f"{self._spec.name}-{name}", self._options.keep_image, self._file.parent
        context = Path(str(build["context"]).replace("$$", "$")) if "context" in build else None
        is_plain = set(build) <= {"context", "dockerfile"} and build.get("dockerfile") in (None, "Dockerfile")
        if context is not None and is_plain:
            return await ensure_image(engine, name=task, docker_image=None, context_dir=context, keep=keep)
        of_context = await asyncio.to_thread(image_tag, task, context) if context is not None else ""
        repository = of_context.partition(":")[0] or f"ares-exp/{name.lower()}"
        identity = json.dumps([build, of_context], sort_keys=True, default=str)
        image = f"{repository}:{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        if await in_thread(lambda: inspect_image(engine.api, image), abandon=True) is None:
            labels = {key: literal(value) for key, value in image_labels(image, keep=keep).items()}
            theirs = build.get("labels") if isinstance(build.get("labels"), dict) else {}
            document = {
                "services": {name: {"image": image, "build": {**build, "labels": {**(theirs or {}), **labels}}}}
            }
            # Otherwise, Compose version 1 leaves the unlabelled container of the failed instruction behind.
            tidy = [] if tool.says_json else ["--force-rm"]
            answer = await tool.run(
                ["-p", "ares-exp-build", "--project-directory", str(folder), "-f", "-", "build", *tidy, name],
                env={**passed_on(), "DOCKER_HOST": engine.host},
                directory=folder,
                stdin=json.dumps(document, default=str).encode(),
            )
            if answer.exit_code != 0:
                raise ContainerStartError(
                    f"The image of service {name} of task {self._spec.name} could not be built:\n{complaint(answer)}"
                )
        return image

    def service(self, name: str) -> ServiceContainer:
        engine, containers = self._engine, self._containers
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
        try:
            problem = await self._remove_project(engine) if self._exists else ""
        except engine_errors() as error:
            problem = reason(error)
        if problem:
            _logger.warning("The compose project %s could not be removed completely: %s.", self.project_name, problem)
        for image in () if self._options.keep_image else sorted(self._built):
            removal = functools.partial(engine.api.remove_image, image)
            if problem := await in_thread(functools.partial(why_it_stays, removal), pool="removals"):
                _logger.info("The image %s was not removed: %s.", image, problem)
        self._built.clear()

    async def _remove_project(self, engine: Engine) -> str:
        """Kills and removes the project's resources. Returns the reason if some remain, otherwise `""`."""
        until = time.monotonic() + APPEARS_WITHIN_SEC
        if not self._containers:
            with contextlib.suppress(*engine_errors()):
                states = await in_thread(lambda: _states(engine.api, self.project_name), pool="removals")
                self._unready = sorted(str(one["Config"]["Labels"].get(SERVICE)) for one in states if not _runs(one))
        ours = f"{PROJECT}={self.project_name}"
        while True:
            found = await in_thread(lambda: list(find_labelled(engine.api, ours)), pool="removals")
            problems = list[str]()
            for are_containers in (True, False):  # they use the networks and volumes
                removals = [one.remove for one in found if (one.kind == "container") == are_containers]
                problems += await asyncio.gather(*(in_thread(removal, pool="removals") for removal in removals))
            if found:
                until = time.monotonic() + APPEARS_WITHIN_SEC
            if not self._may_grow or time.monotonic() > until:
                break
            await asyncio.sleep(_POLL_SEC)  # the compose program was killed
        self._exists = False
        return "; ".join(filter(None, problems))


class Service(RunningContainer):
    """A `ServiceContainer` of a compose project. Its shells are opened by the first command."""

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


def _parse(text: bytes) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load(text)
    if not isinstance(found, dict) or not isinstance(found.get("services"), dict):
        raise ContainerStartError("Expected Docker Compose to print a valid compose file, but its output is not valid.")
    return found


def containers_of(api: APIClient, project: str) -> list[dict[str, Any]]:
    """Lists a project's containers, including stopped ones. Blocking."""
    found: list[dict[str, Any]] = api.containers(all=True, filters={"label": f"{PROJECT}={project}"})
    return found


async def is_ready(engine: Engine, project: str) -> bool:
    """Returns whether all services are ready: running and healthy, or (except for `main`) exited with code 0.

    Raises `ContainerStartError` if a service has failed. The message has its name and the end of its output.
    """
    found = await in_thread(lambda: _states(engine.api, project), abandon=True)
    for one in found:
        if why := _failure(one):
            printed = await in_thread(functools.partial(_log, engine.api, one["Id"]), abandon=True)
            name = one["Config"]["Labels"].get(SERVICE)
            raise ContainerStartError(f"Service {name} {why}." + (f" It last printed:\n{printed}" if printed else ""))
    return bool(found) and all(_runs(one) for one in found)


def _states(api: APIClient, project: str) -> list[Mapping[str, Any]]:
    return [api.inspect_container(one["Id"]) for one in containers_of(api, project)]


def _runs(one: Mapping[str, Any]) -> bool:
    state = one["State"]
    if state["Status"] == "exited":
        return True  # with code 0; `_failure` reports other codes
    return state["Status"] == "running" and _health(state) in ("", "none", "healthy")


def _health(state: Mapping[str, Any]) -> str:
    return str((state.get("Health") or {}).get("Status", ""))


def _failure(one: Mapping[str, Any]) -> str:
    """Returns why a service failed, as a clause. Returns `""` if the service is ready or can still become ready."""
    state, is_main = one["State"], one["Config"]["Labels"].get(SERVICE) == MAIN
    if state["Status"] in ("exited", "dead") and (state["ExitCode"] != 0 or is_main):
        return f"ended with exit code {state['ExitCode']}"
    if state["Status"] == "created" and state.get("Error"):
        return f"could not be started: {state['Error']}"
    if _health(state) == "unhealthy":
        checks = state["Health"].get("Log") or [{}]
        return f"is not healthy. Its health check last printed {str(checks[-1].get('Output', '')).strip()[-500:]!r}"
    return ""


def _log(api: APIClient, container: str) -> str:
    try:
        return str(api.logs(container, tail=_LAST_LINES)[-_LAST_BYTES:].decode("utf-8", "replace")).strip()
    except engine_errors():  # a log driver without storage
        return ""
