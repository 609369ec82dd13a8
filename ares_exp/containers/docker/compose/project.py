"""One compose project on an engine: made from a task's file, and removed with all that belongs to it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.build_context import image_tag
from ares_exp.containers.docker.compose.dangers import read_compose_file, refuse_dangers
from ares_exp.containers.docker.compose.images import ProjectImages
from ares_exp.containers.docker.compose.project_file import MAIN, Ours, base_document, complete, names_of
from ares_exp.containers.docker.compose.readiness import SERVICE, is_ready, wait_until_ready
from ares_exp.containers.docker.compose.removal import containers_of, remove_project
from ares_exp.containers.docker.compose.tool import ComposeTool, find_compose, outer_environment
from ares_exp.containers.docker.compose.undertaker import Undertaker
from ares_exp.containers.docker.creation import starts
from ares_exp.containers.docker.engine import Engine, in_thread
from ares_exp.containers.owned_directory import short_lived_directory
from ares_exp.errors import ContainerStartError, UnsupportedTaskError

# What the programs of this machine obey. A task that sets such a variable sets it in its container alone.
_OBEYED = re.compile(
    r"""(?ix) (path|home|shell|env|ifs|tmp|temp|tmpdir|tz|lang|term|hostaliases|res_options|localdomain|nlspath|locpath
    |gconv_path|getconf_dir|openssl_.*|requests_ca_bundle|curl_ca_bundle|.*_proxy|ps4|cdpath|globignore|shellopts)
    |(ld|dyld|python|go|git|docker|compose|buildkit|buildx|ssl|ssh|xdg|otel|glibc|malloc|lc|bash|bashopts|clicolor)_?.*"""
)
_REQUEST_SEC = "120"  # the first version gives up on the engine after 60


class ComposeProject:
    """The containers, networks and volumes of one playing of a task.

    Attributes:
        name: The name of the project; all that it makes has names that begin with it.
        containers: The container of each service (the first where there are more), once it has been started.
        addresses: By what names its services reach each other, once it has been started.
        built: The images that were built for it.
    """

    def __init__(self, name: str, spec: ContainerSpec, *, trusted: bool, keep_image: bool) -> None:
        """Touches nothing yet.

        Args:
            name: A name that nobody else has, in lower case.
            spec: What the task asks for; with a `compose_file`.
            trusted: Whether its file may ask for anything.
            keep_image: Whether built images are to outlive this process.
        """
        assert spec.compose_file is not None
        self.name = name
        self.containers: dict[str, str] = {}
        self.addresses: list[str] = []
        self.built: set[str] = set()
        self._spec = spec
        self._file = spec.compose_file
        self._trusted = trusted
        self._keep_image = keep_image
        self._undertaker: Undertaker | None = None
        self._may_grow = False

    async def start(self, engine: Engine, ours: Ours) -> None:
        """Builds, pulls, creates and starts everything, and waits until it is ready. The caller bounds it.

        Raises:
            ContainerStartError: With the service that failed, or what the compose program said.
            UserError: The file is malformed, or asks for too much; or there is no compose program.
        """
        folder = self._file.parent
        tool = await asyncio.to_thread(find_compose)
        if not self._trusted:
            await asyncio.to_thread(lambda: refuse_dangers(self._file, read_compose_file(self._file)))
        env = await asyncio.to_thread(self._variables, engine)
        document = await self._read(tool, env)
        if not self._trusted:
            await asyncio.to_thread(refuse_dangers, self._file, document)
        images = ProjectImages(engine, tool, self._spec.name, keep=self._keep_image)
        try:
            image_of = await images.make(document["services"], folder)
        finally:
            self.built = images.built
        whole = complete(document, self._spec, ours, image_of)
        async with starts(engine).slot():
            self._undertaker = await asyncio.to_thread(Undertaker, engine, self.name)
            self._may_grow = True
            answer = await tool.run(
                [*self._arguments(tool), "-f", "-", "up", "-d"],
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
        """Kills and removes everything. Idempotent.

        Returns:
            What stays, and why; `""` when all is gone.
        """
        if self._undertaker is None:
            return ""
        problem = await remove_project(engine, self.name, may_grow=self._may_grow)
        await asyncio.to_thread(self._undertaker.dismiss)
        self._undertaker = None
        return problem

    def _arguments(self, tool: ComposeTool) -> list[str]:
        colours = ["--ansi", "never"] if tool.says_json else ["--no-ansi"]
        return [*colours, "-p", self.name, "--project-directory", str(self._file.parent)]

    async def _read(self, tool: ComposeTool, env: Mapping[str, str]) -> dict[str, Any]:
        """The task's file on top of ours, with variables filled in and the files that it extends."""
        directory = await asyncio.to_thread(short_lived_directory, "build")
        try:
            base = directory.path / "base.json"
            await asyncio.to_thread(lambda: base.write_text(json.dumps(base_document(self._spec)), encoding="utf-8"))
            arguments = [*self._arguments(tool), "-f", str(base), "-f", str(self._file), "config"]
            arguments += ["--format", "json"] if tool.says_json else []
            answer = await tool.run(arguments, env=env, directory=self._file.parent)
        finally:
            await asyncio.to_thread(directory.remove)
        if answer.exit_code != 0:
            raise UnsupportedTaskError(f"{self._file}: Docker Compose {tool.version} refuses it: {answer.complaint}")
        return await asyncio.to_thread(_parse, answer.output)

    def _variables(self, engine: Engine) -> dict[str, str]:
        """The environment of the compose program, which is what a `$NAME` in the file can be."""
        spec = self._spec
        env = {name: value for name, value in spec.env.items() if not _OBEYED.fullmatch(name)}
        context = spec.context_dir or self._file.parent
        env["CONTEXT_DIR"] = str(context)
        env["MAIN_IMAGE_NAME"] = spec.docker_image or image_tag(f"{spec.name}-{MAIN}", context)
        env |= {"PREBUILT_IMAGE_NAME": spec.docker_image} if spec.docker_image else {}
        env |= {"CPUS": f"{spec.cpus:g}"} if spec.cpus is not None else {}
        env |= {"MEMORY": f"{spec.memory_mb}M"} if spec.memory_mb is not None else {}
        return {**env, **outer_environment(), "DOCKER_HOST": engine.host, "COMPOSE_HTTP_TIMEOUT": _REQUEST_SEC}


def _parse(text: str) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load(text)
    if not isinstance(found, dict) or not isinstance(found.get("services"), dict):
        raise ContainerStartError("The compose program printed no compose file.")
    return found
