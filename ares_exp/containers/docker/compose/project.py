"""A compose project on an engine: its creation from a task's file, and its removal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ares_exp import cancellation
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.compose.images import ProjectImages
from ares_exp.containers.docker.compose.project_file import Ours, base_document, complete, names_of
from ares_exp.containers.docker.compose.readiness import SERVICE, is_ready, not_ready_yet, wait_until_ready
from ares_exp.containers.docker.compose.removal import containers_of, remove_project
from ares_exp.containers.docker.compose.security_policy import Bounds, check_file, refuse_violations
from ares_exp.containers.docker.compose.tool import ComposeTool, find_compose
from ares_exp.containers.docker.compose.variables import variables
from ares_exp.containers.docker.creation import starts
from ares_exp.containers.docker.engine import Engine, in_thread
from ares_exp.containers.docker.reaper import watch_over_us
from ares_exp.containers.owned_directory import OwnedDirectory, short_lived_directory
from ares_exp.errors import ContainerStartError, UnsupportedTaskError


class ComposeProject:
    """The containers, networks and volumes of one attempt at a task.

    Attributes:
        name: The name of the project, and the prefix of all names in it.
        containers: The container of each service (the first of several), once started.
        addresses: The names by which its services reach each other, once started.
        built: The images built for it.
        unready: The services that were not ready when it was removed during its start.
    """

    def __init__(self, name: str, spec: ContainerSpec, *, bounds: Bounds | None, keep_image: bool) -> None:
        """Opens nothing yet.

        Args:
            name: A unique name, in lower case.
            spec: The task's container, with a `compose_file`.
            bounds: The bounds of its file; `None`: the user trusts it.
            keep_image: Whether built images outlive this process.
        """
        assert spec.compose_file is not None
        self.name = name
        self.containers: dict[str, str] = {}
        self.addresses: list[str] = []
        self.built: set[str] = set()
        self.unready: list[str] = []
        self._spec = spec
        self._file = spec.compose_file
        self._bounds = bounds
        self._keep_image = keep_image
        self._exists = False
        self._may_grow = False

    async def start(self, engine: Engine, ours: Ours) -> None:
        """Builds or pulls the images, starts the services, and waits until they are ready. The caller bounds it.

        Raises:
            ContainerStartError: With the failed service, or the message of the compose program.
            UserError: The file is malformed or violates the security policy, or there is no compose program.
        """
        folder = self._file.parent
        tool = await asyncio.to_thread(find_compose)
        await asyncio.to_thread(check_file, self._spec, self._bounds)
        env = await asyncio.to_thread(variables, self._spec, engine.host)
        document = await self._read(tool, env)
        await asyncio.to_thread(refuse_violations, self._file, document, self._bounds)
        images = ProjectImages(engine, tool, self._spec.name, keep=self._keep_image)
        try:
            image_of = await images.make(document["services"], folder)
        finally:
            self.built = images.built
        whole = complete(document, self._spec, ours, image_of)
        async with starts(engine).slot():
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
        await wait_until_ready(engine, self.name)
        self.containers = await in_thread(lambda: self._containers(engine), abandon=True)
        self.addresses = names_of(document)

    def _containers(self, engine: Engine) -> dict[str, str]:
        found = [(one["Labels"].get(SERVICE), one["Names"][0]) for one in containers_of(engine.api, self.name)]
        return {service: name.lstrip("/") for service, name in sorted(found, reverse=True)}

    async def remove(self, engine: Engine) -> str:
        """Kills and removes the whole project. Idempotent.

        Returns:
            Why something of it remains; `""` when all is gone.
        """
        if not self._exists:
            return ""
        if not self.containers:
            self.unready = await not_ready_yet(engine, self.name)
        problem = await remove_project(engine, self.name, may_grow=self._may_grow)
        self._exists = False
        return problem

    def _arguments(self) -> list[str]:
        return ["--ansi", "never", "-p", self.name, "--project-directory", str(self._file.parent)]

    async def _read(self, tool: ComposeTool, env: Mapping[str, str]) -> dict[str, Any]:
        """Reads the task's file, merged on top of ours, with variables and extended files filled in."""
        base = _TemporaryFile(base_document(self._spec))
        try:
            await cancellation.in_thread(base.write)
            arguments = [*self._arguments(), "-f", str(base.path), "-f", str(self._file), "config"]
            arguments += ["--format", "json"] if tool.says_json else []
            answer = await tool.run(arguments, env=env, directory=self._file.parent)
        finally:
            await cancellation.in_thread(base.remove)
        if answer.exit_code != 0:
            raise UnsupportedTaskError(f"{self._file}: Docker Compose {tool.version} refuses it: {answer.complaint}")
        document = await asyncio.to_thread(_parse, answer.output)
        if not tool.says_json:  # version 1 also prints services of inactive profiles
            document["services"] = {name: one for name, one in document["services"].items() if not one.get("profiles")}
        return document


class _TemporaryFile:
    """A compose file of ours, in a temporary directory."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._directory: OwnedDirectory | None = None
        self.path = Path()

    def write(self) -> None:
        self._directory = short_lived_directory("build")
        self.path = self._directory.path / "base.json"
        self.path.write_text(json.dumps(self._document), encoding="utf-8")

    def remove(self) -> None:
        if self._directory is not None:
            self._directory.remove()


def _parse(text: str) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load(text)
    if not isinstance(found, dict) or not isinstance(found.get("services"), dict):
        raise ContainerStartError("Expected a compose file from the compose program, got something else.")
    return found
