"""A compose project on an engine: its creation from a task's file, and its removal."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp import cancellation
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.compose.project_file import MAIN, base_document, complete, literal, names_of
from ares_exp.containers.docker.compose.security_policy import check_file, refuse_violations
from ares_exp.containers.docker.compose.tool import ComposeTool, find_compose, variables
from ares_exp.containers.docker.container import DockerOptions
from ares_exp.containers.docker.container_lifetime import remove, starts, why_it_stays
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.leftovers import image_labels
from ares_exp.containers.docker.reaper import watch_over_us
from ares_exp.containers.images.docker_cli import passed_on
from ares_exp.containers.images.image import ensure_image, image_tag, inspect_image
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import ContainerStartError, UnsupportedTaskError

if TYPE_CHECKING:
    from docker import APIClient

_POLL_SEC = 0.1
_LAST_LINES = 20
_LAST_BYTES = 4096

PROJECT = "com.docker.compose.project"
"""Label on all resources of a project. Its value is the name of the project."""

APPEARS_WITHIN_SEC = 2.0
"""Seconds after the death of the compose program in which the engine may still execute its requests."""

SERVICE = "com.docker.compose.service"
"""Label of a container. Its value is the name of the container's service."""


class ComposeProject:
    """The containers, networks and volumes of one attempt at a task. All their names start with `name`.

    Attributes:
        containers: Name of one container per service; empty before the start.
        addresses: Names by which the services reach each other; empty before the start.
        built: Names of the images that were built for the project.
        unready: Names of the services that were not ready when a start failed.
    """

    def __init__(self, name: str, spec: ContainerSpec, options: DockerOptions) -> None:
        assert spec.compose_file is not None
        self.name = name
        self.containers: dict[str, str] = {}
        self.addresses: list[str] = []
        self.built: set[str] = set()
        self.unready: list[str] = []
        self._spec = spec
        self._file = spec.compose_file
        self._options = options
        self._exists = False
        self._may_grow = False

    async def start(self, engine: Engine) -> None:
        """Builds or pulls the images, starts the services, and waits until they are ready. The caller sets the timeout.

        Raises `ContainerStartError` if a service or the compose program fails, and another `UserError` if the file is
        invalid.
        """
        folder = self._file.parent
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
                directory=folder,
                stdin=json.dumps(whole, default=str).encode(),
            )
            self._may_grow = False
        if answer.exit_code != 0:
            await is_ready(engine, self.name)
            raise ContainerStartError(f"`{' '.join(tool.command)} up` failed:\n{answer.complaint}")
        while not await is_ready(engine, self.name):  # noqa: ASYNC110 (polls the engine; the caller bounds it)
            await asyncio.sleep(_POLL_SEC)
        self.containers = await in_thread(lambda: self._containers(engine), abandon=True)
        self.addresses = names_of(document)

    async def _make_images(
        self, engine: Engine, tool: ComposeTool, services: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, str]:
        images, renamed = dict[str, str](), dict[str, str]()
        for name, service in services.items():
            if service.get("build"):
                images[name] = renamed[str(service.get("image"))] = await self._build(
                    engine, tool, name, service["build"]
                )
                self.built.add(images[name])
        for name, service in services.items():
            if name in images:
                continue
            if not (image := str(service.get("image") or "")):
                raise ContainerStartError(f"Service {name} of task {self._spec.name} has neither `image` nor `build`.")
            images[name] = renamed.get(image, image.replace("$$", "$"))
            await ensure_image(engine, name=self._spec.name, docker_image=images[name], context_dir=None)
        return images

    async def _build(self, engine: Engine, tool: ComposeTool, name: str, build: Mapping[str, Any]) -> str:
        """Builds the image of the service `name` unless an equal image exists. Returns the name of the image."""
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
                    f"The image of service {name} of task {self._spec.name} could not be built:\n{answer.complaint}"
                )
        return image

    def _containers(self, engine: Engine) -> dict[str, str]:
        found = [(one["Labels"].get(SERVICE), one["Names"][0]) for one in containers_of(engine.api, self.name)]
        return {service: name.lstrip("/") for service, name in sorted(found, reverse=True)}

    async def remove(self, engine: Engine) -> str:
        """Kills and removes the project. Returns the reason if resources remain, otherwise `""`. Idempotent."""
        if not self._exists:
            return ""
        until = time.monotonic() + APPEARS_WITHIN_SEC
        if not self.containers:
            with contextlib.suppress(*engine_errors()):
                found = await in_thread(lambda: _states(engine.api, self.name), pool="removals")
                self.unready = sorted(str(one["Config"]["Labels"].get(SERVICE)) for one in found if not _runs(one))
        try:
            problems, count = await self._remove_once(engine)
            while self._may_grow and time.monotonic() < until:  # the compose program was killed
                if count:
                    until = time.monotonic() + APPEARS_WITHIN_SEC
                await asyncio.sleep(_POLL_SEC)
                problems, count = await self._remove_once(engine)
        except engine_errors() as error:
            return reason(error)
        self._exists = False
        return "; ".join(problems)

    async def _remove_once(self, engine: Engine) -> tuple[list[str], int]:
        """Removes all existing resources. Returns the reasons of failed removals, and the number of resources found."""
        api, ours = engine.api, {"label": f"{PROJECT}={self.name}"}
        containers = await in_thread(lambda: containers_of(api, self.name), pool="removals")
        removals = [functools.partial(remove, engine, one["Id"]) for one in containers]
        await asyncio.gather(*(in_thread(removal, pool="removals") for removal in removals))
        networks = await in_thread(lambda: api.networks(filters=ours), pool="removals")
        volumes = await in_thread(lambda: api.volumes(filters=ours)["Volumes"] or [], pool="removals")
        calls = [functools.partial(why_it_stays, functools.partial(api.remove_network, one["Id"])) for one in networks]
        calls += [functools.partial(why_it_stays, functools.partial(api.remove_volume, one["Name"])) for one in volumes]
        stays = await asyncio.gather(*(in_thread(call, pool="removals") for call in calls))
        return [why for why in stays if why], len(containers) + len(calls)

    def _arguments(self) -> list[str]:
        return ["--ansi", "never", "-p", self.name, "--project-directory", str(self._file.parent)]

    async def _read(self, tool: ComposeTool, env: Mapping[str, str]) -> dict[str, Any]:
        """Reads the task's file, merged on top of `base_document`, with substituted variables and included files."""
        async with working_directory("build") as folder:
            base = folder / "base.json"
            await asyncio.to_thread(lambda: base.write_text(json.dumps(base_document(self._spec)), encoding="utf-8"))
            arguments = [*self._arguments(), "-f", str(base), "-f", str(self._file), "config"]
            arguments += ["--format", "json"] if tool.says_json else []
            answer = await tool.run(arguments, env=env, directory=self._file.parent)
        if answer.exit_code != 0:
            raise UnsupportedTaskError(
                f"{self._file}: Docker Compose {tool.version} rejects this file: {answer.complaint}"
            )
        document = await asyncio.to_thread(_parse, answer.output)
        if not tool.says_json:  # version 1 also prints services of inactive profiles
            document["services"] = {name: one for name, one in document["services"].items() if not one.get("profiles")}
        return document


def _parse(text: str) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load(text)
    if not isinstance(found, dict) or not isinstance(found.get("services"), dict):
        raise ContainerStartError("The output of the compose program is not a valid compose file.")
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
    """Returns the reason why a service failed, as a clause; empty if the service is ready or may become ready."""
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
