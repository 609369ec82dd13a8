"""The images of a compose project's services, made before the project starts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ares_exp.containers.docker.compose.project_file import literal
from ares_exp.containers.docker.compose.tool import ComposeTool, outer_environment
from ares_exp.containers.docker.engine import Engine, in_thread
from ares_exp.containers.docker.leftovers import image_labels
from ares_exp.containers.images.docker_cli import passed_on
from ares_exp.containers.images.image import ensure_image, image_tag, inspect_image
from ares_exp.errors import ContainerStartError


class ProjectImages:
    """Pulls and builds the images of one project.

    Attributes:
        built: The names of the images built from a Dockerfile.
    """

    def __init__(self, engine: Engine, tool: ComposeTool, task: str, *, keep: bool) -> None:
        self.built: set[str] = set()
        self._engine = engine
        self._tool = tool
        self._task = task
        self._keep = keep

    async def make(self, services: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, str]:
        """Builds and pulls the missing images.

        Args:
            services: The services in the output of the compose program.
            folder: Its working directory.

        Returns:
            The image of each service, by name.

        Raises:
            ContainerStartError: With the service and the reason.
        """
        images, renamed = dict[str, str](), dict[str, str]()
        for name, service in services.items():
            if service.get("build"):
                images[name] = await self._build(name, service["build"], folder)
                self.built.add(images[name])
                renamed[str(service.get("image"))] = images[name]
        for name, service in services.items():
            if name not in images:
                if not service.get("image"):
                    raise ContainerStartError(f"Service {name} of task {self._task} has neither an image nor a build.")
                image = str(service["image"]).replace("$$", "$")
                images[name] = renamed.get(str(service["image"]), image)
                await ensure_image(self._engine, name=self._task, docker_image=images[name], context_dir=None)
        return images

    async def _build(self, name: str, build: Mapping[str, Any], folder: Path) -> str:
        """Builds one image: a plain build is shared by all that need the same, others rely on the engine's cache."""
        context = Path(str(build["context"]).replace("$$", "$")) if "context" in build else None
        if (
            context is not None
            and set(build) <= {"context", "dockerfile"}
            and build.get("dockerfile") in (None, "Dockerfile")
        ):
            return await ensure_image(
                self._engine, name=f"{self._task}-{name}", docker_image=None, context_dir=context, keep=self._keep
            )
        of_context = await asyncio.to_thread(image_tag, f"{self._task}-{name}", context) if context is not None else ""
        repository = of_context.partition(":")[0] or f"ares-exp/{name.lower()}"
        identity = json.dumps([build, of_context], sort_keys=True, default=str)
        image = f"{repository}:{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        if await in_thread(lambda: inspect_image(self._engine.api, image), abandon=True) is None:
            labels = {key: literal(value) for key, value in image_labels(image, keep=self._keep).items()}
            theirs = build.get("labels") if isinstance(build.get("labels"), dict) else {}
            document = {
                "services": {name: {"image": image, "build": {**build, "labels": {**(theirs or {}), **labels}}}}
            }
            # Else Compose version 1 leaves the unlabelled container of the failed instruction.
            tidy = [] if self._tool.says_json else ["--force-rm"]
            answer = await self._tool.run(
                ["-p", "ares-exp-build", "--project-directory", str(folder), "-f", "-", "build", *tidy, name],
                env={**passed_on(), **outer_environment(), "DOCKER_HOST": self._engine.host},
                directory=folder,
                stdin=json.dumps(document, default=str).encode(),
            )
            if answer.exit_code != 0:
                raise ContainerStartError(
                    f"The image of service {name} of task {self._task} could not be built:\n{answer.complaint}"
                )
        return image
