"""`container=docker`: containers of a Docker engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ares_exp.containers.docker.factory import DockerContainerFactory as DockerContainerFactory

__all__ = ["DockerContainerFactory"]


def __getattr__(name: str) -> Any:
    """Imports the factory on first use. An earlier import would be circular, because the factory needs this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ares_exp.containers.docker.factory import DockerContainerFactory

    return DockerContainerFactory
