"""An environment in a host of this process: every message is pickled there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.own_model import OwnModel
from ares_exp.llms.request import LLMClient
from ares_exp.runs.executors.environment_host import EnvironmentHost
from ares_exp.runs.executors.host_connection import InProcessConnection
from ares_exp.runs.executors.remote_environment import RemoteEnvironment
from ares_exp.runs.executors.remote_host import RemoteHost


class HostedEnvironment(RemoteEnvironment):
    """Lives in a separate host, which ends with it.

    Attributes:
        hosts: All that there were, as the run sees them.
        inside_now: The last one.
        name_inside: What the environment is called in it.
    """

    inside_now: EnvironmentHost
    name_inside: str

    def __init__(
        self,
        make_environment: Callable[[], MinimalEnvironment],
        models: Sequence[OwnModel] = (),
        *,
        lease_sec: float = 60.0,
        files: Path | None = None,
        background_client: LLMClient | None = None,
    ) -> None:
        super().__init__(self._make_host, task_name="a task", background_client=background_client)
        self._make_environment = make_environment
        self._models = {model.key: model for model in models}
        self._lease_sec = lease_sec
        self._files = files
        self.hosts: list[RemoteHost] = []

    async def _make_host(self, name: str) -> RemoteHost:
        inside = self.inside_now = EnvironmentHost(lease_sec=self._lease_sec)
        self.name_inside = name
        streams = self._files is not None
        inside.adopt(name, self._make_environment(), files=self._files or self.output_dir, is_streamed=streams)
        host = RemoteHost(InProcessConnection(inside), models=self._models, lease_sec=self._lease_sec)
        await host.start()
        self.hosts.append(host)
        return host

    async def close(self) -> None:
        await super().close()
        for host in self.hosts:
            await host.close()
