"""The factories of `container=docker` and `container=podman`. Podman implements the same API as Docker's engine.

A container ends when the process that started it ends, even after SIGKILL: its first process ends when its stdin, which
we hold open, is closed. The engine then removes the container. Commands run on persistent shells (`command_runner`),
because one `docker exec` takes tens of milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic

from ares_exp.containers.container import Container, ContainerFactoryBase, ContainerSpec, Shell
from ares_exp.containers.docker.capture import CaptureWay
from ares_exp.containers.docker.compose.container import ComposeContainer, check_compose
from ares_exp.containers.docker.container import DockerContainer, DockerOptions
from ares_exp.containers.docker.engine import (
    PODMAN_SOCKET,
    Capabilities,
    connect,
    connect_blocking,
    engine_errors,
    in_thread,
    reason,
    unenforced,
    why_unreachable,
)
from ares_exp.containers.docker.image import check_buildable
from ares_exp.containers.docker.leftovers import find, remove_stale
from ares_exp.containers.docker.mounts import check_mounts
from ares_exp.containers.docker.network import NetworkOptions, check_network
from ares_exp.containers.images.dockerfile_instructions import find_dockerfile
from ares_exp.containers.network_policy import NetworkPolicy, normalise_host
from ares_exp.containers.ownership import Leftover
from ares_exp.errors import ConfigError, ContainerServiceError, PreflightError, UnreachableError
from ares_exp.records.secrets import is_sensitive, protect


class DockerContainerFactory(ContainerFactoryBase):
    """Creates containers on the engine at `DOCKER_HOST`. Default: the current Docker context, or the local socket."""

    name = "docker"
    harbor_name = "docker"
    has_terminals = True
    forwards_ports = True
    harmless_options = frozenset({"shell", "keep_image", "pids_limit", "swap_mb", "no_new_privileges", "env"})

    @pydantic.validate_call
    def __init__(
        self,
        *,
        network: Literal["public", "no-network"] | None = None,
        allowed_hosts: Sequence[Annotated[str, pydantic.AfterValidator(normalise_host)]] | None = None,
        shell: Shell = "bash -c",
        keep_image: bool = True,
        env: Mapping[str, str] | None = None,
        extra_hosts: Mapping[str, str] | None = None,
        pids_limit: Annotated[int, pydantic.Field(ge=16)] = 4096,
        swap_mb: Annotated[int, pydantic.Field(ge=0)] = 0,
        no_new_privileges: bool = False,
        capture: CaptureWay = "auto",
        compose_max_containers: Annotated[int, pydantic.Field(ge=1)] = 16,
        compose_max_memory_mb: Annotated[int, pydantic.Field(ge=64)] = 8192,
        compose_trusted: bool = False,
    ) -> None:
        """Validates the options.

        Args:
            network: `public` (the engine's bridge) or `no-network` (only loopback) for all phases, instead of the
                task's policies. `None`: the task's policies. Containers reach the `allowed_hosts` of a task through an
                HTTP(S) proxy (`HTTPS_PROXY` and similar variables). It needs root and an engine on this machine.
            allowed_hosts: Additional allowed hosts in every phase: `[pypi.org,*.pythonhosted.org]`. With them,
                `no-network` becomes an allowlist.
            shell: Shell of commands. `bash -c` and `sh -c` keep the image's environment variables. `bash -lc` first
                reads the image's profile files, which reset `PATH` on Debian.
            keep_image: Whether images that are built from a task's Dockerfile are kept for later runs. Otherwise, each
                image is removed together with the last container that uses it.
            env: Environment variables for every container. The task's variables override them.
            extra_hosts: Additional lines of `/etc/hosts`: `{host.docker.internal: host-gateway}` (the engine's host).
            pids_limit: Maximum number of processes in one container, as a protection against fork bombs.
            swap_mb: Swap that a container may use in addition to its memory limit.
            no_new_privileges: Whether programs in the container cannot gain privileges when they start. sudo and su
                then fail.
            capture: Method by which snapshots read a container's changes. `upper`: from the engine's directory, which
                needs root on its machine and an overlay storage driver. `archive`: from an archive made by GNU tar in
                the container. It is slower, and may lose details such as hard links and names that are not UTF-8.
                `auto`: `upper` if possible.
            compose_max_containers: Maximum number of containers, and of networks, that a task's compose file creates.
            compose_max_memory_mb: Maximum memory of each service other than `main`, in MiB. Services without a limit
                get this limit.
            compose_trusted: Whether a task's compose file may use all features of Docker Compose, including privileged
                containers and the directories, devices and networks of the engine's machine. Set it only for tasks that
                you would also run as programs on that machine.
        """
        protect(value for name, value in (env or {}).items() if is_sensitive(name))
        self._options = DockerOptions(
            host=self.default_host(),
            network=NetworkOptions(
                override=NetworkPolicy(network) if network is not None else None,
                allowed_hosts=frozenset(allowed_hosts or ()),
                extra_hosts=dict(extra_hosts or {}),
            ),
            shell=shell,
            keep_image=keep_image,
            env=dict(env or {}),
            pids_limit=pids_limit,
            swap_mb=swap_mb,
            no_new_privileges=no_new_privileges,
            capture=capture,
            compose_max_containers=compose_max_containers,
            compose_max_memory_mb=compose_max_memory_mb,
            compose_trusted=compose_trusted,
        )
        self._capabilities = Capabilities()  # the defaults, until `preflight` reads the engine's capabilities

    @classmethod
    def default_host(cls) -> str | None:
        """Returns the engine's address. `None`: `DOCKER_HOST`, the current Docker context, or the default socket."""
        return None

    def __call__(self, spec: ContainerSpec) -> Container:
        if spec.compose_file is not None:
            return ComposeContainer(spec, self._options)
        return DockerContainer(spec, self._options)

    @property
    def options(self) -> dict[str, Any]:
        """The constructor's options as JSON values. `env` has only names of variables, because values may be secret."""
        options = self._options
        network = options.network
        return {
            "network": None if network.override is None else network.override.mode,
            "allowed_hosts": sorted(network.allowed_hosts),
            "shell": options.shell,
            "keep_image": options.keep_image,
            "extra_hosts": dict(network.extra_hosts),
            "pids_limit": options.pids_limit,
            "swap_mb": options.swap_mb,
            "no_new_privileges": options.no_new_privileges,
            **({"env": sorted(options.env)} if options.env else {}),
        }

    async def preflight(self) -> None:
        """Checks that the engine responds, and removes leftovers of dead runs.

        Raises `PreflightError` if the engine does not respond, or if its address is not supported (TLS, ssh).
        """
        engine = await connect(self._options.host)
        self._capabilities = engine.capabilities
        if why := await why_unreachable(self._options.host):  # `connect` may have returned an earlier connection
            raise PreflightError(f"{why}. Restart it, or set DOCKER_HOST to another engine.")
        await in_thread(lambda: remove_stale(engine), pool="removals")

    async def check_reachable(self) -> None:
        if why := await why_unreachable(self._options.host):
            raise UnreachableError(f"{why}.")

    def check_snapshots(self) -> None:
        if not self._options.keep_image:
            raise ConfigError(
                "Snapshots contain changes to a container's image, but container.keep_image=false removes the "
                "image with the container. Set container.keep_image=true, or snapshot=none."
            )

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        try:
            yield from find(connect_blocking(cls.default_host()).api, cached_images=images)
        except engine_errors() as error:
            raise ContainerServiceError(
                f"The containers of the Docker engine cannot be listed: {reason(error)}."
            ) from error

    def check(self, spec: ContainerSpec) -> list[str]:
        host, warnings = self._options.host, list[str]()
        check_mounts(spec, host)
        if spec.compose_file is not None:
            warnings = check_compose(spec, self._options)
        elif spec.docker_image is None:
            check_buildable(find_dockerfile(spec.name, spec.context_dir), lambda: connect_blocking(host))
        return [*warnings, *check_network(spec, self._options.network, host), *unenforced(spec, self._capabilities)]


class PodmanContainerFactory(DockerContainerFactory):
    """Creates containers with Podman's service: for root, the system's service, otherwise the user's own service.

    The address is `CONTAINER_HOST`, or by default Podman's socket. The options are the same as for `container=docker`.
    """

    name = "podman"

    @classmethod
    def default_host(cls) -> str:
        runtime = "/run" if os.getuid() == 0 else os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
        return os.environ.get("CONTAINER_HOST") or f"unix://{runtime}{PODMAN_SOCKET}"

    @classmethod
    def find_leftovers(cls, *, images: bool = False, snapshots: bool = False) -> Iterator[Leftover]:
        """Lists the leftovers on Podman's service, or nothing if this machine has no Podman."""
        if "CONTAINER_HOST" in os.environ or Path(urlsplit(cls.default_host()).path).exists():
            yield from super().find_leftovers(images=images, snapshots=snapshots)
