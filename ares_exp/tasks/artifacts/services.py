"""The services of a container that task.toml names, such as `main`, which is the agent's own."""

from __future__ import annotations

from ares_exp.containers.container import ComposedContainer, Container, ServiceContainer
from ares_exp.errors import ContainerError
from ares_exp.tasks.artifact import MAIN_SERVICE


def service_of(container: Container, name: str) -> Container | ServiceContainer:
    """The service of that name.

    Raises:
        ContainerError: There is none.
    """
    if name == MAIN_SERVICE:
        return container
    if not isinstance(container, ComposedContainer):
        raise ContainerError(f"Expected a container with a service {name!r} beside it, got one without services.")
    return container.service(name)
