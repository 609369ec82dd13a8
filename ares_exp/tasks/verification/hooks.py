"""Collect hooks: commands run in the services of a container when its agent is done, before artifacts are fetched."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ares_exp.containers.container import ComposedContainer, Container, ExecOptions, ServiceContainer
from ares_exp.errors import ContainerDiedError, ContainerError
from ares_exp.tasks.artifact import MAIN_SERVICE, CollectHook
from ares_exp.tasks.verification.health_check import whole_seconds

MAX_HOOK_SEC = 1800.0
"""Bound on a hook that sets none."""
_SHOWN_OUTPUT_CHARS = 500

_logger = logging.getLogger(__name__)


def hook_limit_sec(hook: CollectHook) -> float:
    """Seconds that the hook may take."""
    return min(whole_seconds(hook.timeout_sec) or MAX_HOOK_SEC, MAX_HOOK_SEC)


async def run_hooks(hooks: Iterable[CollectHook], container: Container) -> None:
    """Runs the hooks one after the other. A failure is logged, no more.

    Raises:
        ContainerDiedError: The agent's container is gone.
    """
    for hook in hooks:
        options: ExecOptions = {"timeout_sec": hook_limit_sec(hook)}
        if hook.user is not None:
            options["user"] = hook.user
        try:
            result = await service_of(container, hook.service).exec(hook.command, **options)
        except (ContainerError, ValueError) as error:
            if isinstance(error, ContainerDiedError) and hook.service == MAIN_SERVICE:
                raise
            _logger.warning("The collect hook `%s` in %s failed: %s", hook.command, hook.service, error)
            continue
        if result.exit_code != 0:
            ending = "took too long" if result.timed_out else f"gave exit code {result.exit_code}"
            output = result.output.strip()[-_SHOWN_OUTPUT_CHARS:]
            _logger.warning("The collect hook `%s` in %s %s: %s", hook.command, hook.service, ending, output)


def service_of(container: Container, name: str) -> Container | ServiceContainer:
    """Returns the service of that name.

    Raises:
        ContainerError: There is none.
    """
    if name == MAIN_SERVICE:
        return container
    if not isinstance(container, ComposedContainer):
        raise ContainerError(f"Expected a container with a service {name!r} beside it, got one without services.")
    return container.service(name)
