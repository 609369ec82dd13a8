"""The network of a task's phases, in the terms of task.toml."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from ares_exp.containers.network_policy import NetworkMode, NetworkPolicy, normalise_host
from ares_exp.tasks.toml_table import TomlTable

AllowedHost = Annotated[str, AfterValidator(normalise_host)]


class PhaseTable(TomlTable):
    """A table that may override the network of one phase (`[agent]`, `[verifier]`)."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[AllowedHost, ...] | None = None

    @model_validator(mode="after")
    def _hosts_need_a_mode(self) -> Self:
        if self.network is None and self.allowed_hosts is not None:
            raise ValueError('allowed_hosts needs network_mode = "allowlist" beside it, got no network_mode')
        return self

    @property
    def network(self) -> NetworkPolicy | None:
        """The override, or `None` where the environment's policy stays in force.

        Raises:
            ValueError: Hosts under a mode that does not read them; validation has seen to it.
        """
        mode = self.network_mode
        return None if mode is None else NetworkPolicy(mode, frozenset(self.allowed_hosts or ()))
