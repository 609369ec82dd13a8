"""Containers of a Docker engine: the factory that Hydra instantiates, and what it makes.

A container lives no longer than the process that started it: its first process reads a stdin that we hold, and ends
with it, also when we are killed with SIGKILL; the engine then removes the container. Commands run over persistent
shells (`shell_channel`), because one `docker exec` costs tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import pydantic

from ares_exp.containers.container import ContainerSpec, NetworkMode
from ares_exp.containers.docker.container import DockerContainer, DockerOptions
from ares_exp.containers.docker.dockerfile_check import check_dockerfile
from ares_exp.containers.docker.engine import connect, engine_errors, in_thread, reason
from ares_exp.errors import PreflightError, TaskError, UnsupportedTaskError
from ares_exp.secrets import is_sensitive, protect


class DockerContainerFactory:
    """Makes containers on the engine of `DOCKER_HOST` (default: the current Docker context, else the local socket)."""

    name = "docker"

    @pydantic.validate_call
    def __init__(
        self,
        *,
        network: NetworkMode | None = None,
        login_shell: bool = True,
        keep_image: bool = True,
        env: Mapping[str, str] | None = None,
        extra_hosts: Mapping[str, str] | None = None,
        pids_limit: Annotated[int, pydantic.Field(ge=16)] = 4096,
    ) -> None:
        """Keeps the options; touches nothing.

        Args:
            network: `public` or `no-network`, overriding what tasks ask for; `None` leaves it to the task.
            login_shell: Commands run in `bash -lc`, which reads the image's profile files (on Debian these reset
                `PATH`); `False` is `bash -c`, faster.
            keep_image: Keep images that were built from a task's Dockerfile, for the next run. `False` removes each
                with the last container that uses it.
            env: Variables of every container; those of the task win.
            extra_hosts: More lines of `/etc/hosts`, name to address (`host-gateway` is the engine's host).
            pids_limit: Bound on the processes of one container, so that a fork bomb stays inside.
        """
        protect(value for name, value in (env or {}).items() if is_sensitive(name))
        self._options = DockerOptions(
            network=network,
            login_shell=login_shell,
            keep_image=keep_image,
            env=dict(env or {}),
            extra_hosts=dict(extra_hosts or {}),
            pids_limit=pids_limit,
        )

    def __call__(self, spec: ContainerSpec) -> DockerContainer:
        """A container for `spec`, not started yet."""
        return DockerContainer(spec, self._options)

    async def preflight(self) -> None:
        """Checks that the engine answers.

        Raises:
            PreflightError: It does not, or is reached in a way that is not supported (TLS, ssh).
        """
        engine = await connect()
        try:
            await in_thread(engine.api.ping)
        except engine_errors() as error:
            raise PreflightError(
                f"The Docker engine at {engine.host} no longer answers: {reason(error)}. Restart it, or set "
                "DOCKER_HOST to another one."
            ) from error

    def check(self, spec: ContainerSpec) -> list[str]:
        """As `ContainerFactory.check`.

        Raises:
            UnsupportedTaskError: The task needs several services or GPUs.
            TaskError: It has neither an image nor a Dockerfile, or the Dockerfile is malformed.
        """
        context = spec.context_dir
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            if context is not None and (context / name).exists():
                raise UnsupportedTaskError(
                    f"Task {spec.name} needs several services ({context / name}); container=docker runs one container "
                    "per task. Leave this task out."
                )
        if spec.gpus:
            raise UnsupportedTaskError(
                f"Task {spec.name} asks for {spec.gpus} GPUs; container=docker gives none. Leave this task out."
            )
        if spec.docker_image is None and not (context is not None and (context / "Dockerfile").is_file()):
            where = f"in {context}" if context is not None else "anywhere (it has no environment directory)"
            raise TaskError(
                f"Task {spec.name}: expected a Dockerfile or a docker_image, found no Dockerfile {where}. Add one, or "
                "set docker_image in the [environment] table of its task.toml."
            )
        if spec.docker_image is None and context is not None:
            check_dockerfile(context / "Dockerfile")
        if spec.storage_mb is not None:
            return [f"storage_mb={spec.storage_mb} of task {spec.name} is not enforced by container=docker"]
        return []
