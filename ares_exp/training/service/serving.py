"""The part of `ares-exp serve` that takes the place of a trainer: it serves rollouts until the run is interrupted."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ares_exp.errors import ConfigError, PreflightError
from ares_exp.policies.policy import Policy
from ares_exp.runs.trainer import TrainedRun
from ares_exp.training.driver import EpisodeDriver
from ares_exp.training.service.http_service import LOOPBACK, HttpService
from ares_exp.training.service.rollout_policies import RolloutPolicies
from ares_exp.training.service.served_rollouts import ServedRollouts
from ares_exp.training.service.service_record import ServiceRecord


class ServeOptions(BaseModel):
    """The options `serve.*` of `ares-exp serve`.

    Attributes:
        host: Address to listen on. An address other than a loopback address requires `key_env`.
        port: Port to listen on; 0 selects a free port.
        key_env: Environment variable with the API key that each request must contain.
        queue: Maximum number of running and waiting rollouts.
        unacknowledged: Maximum number of finished episodes that trainers have not acknowledged. The service rejects
            submissions that could exceed it.
        lease_sec: Number of seconds without a call from a trainer after which its rollouts are cancelled.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8300
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    queue: Annotated[int, Field(ge=1)] = 1024
    unacknowledged: Annotated[int, Field(ge=1)] = 4096
    lease_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0


class Service:
    """The trainer of a run that serves rollouts: it runs the rollouts that other processes submit.

    Attributes:
        policy: Policy of the run, which sends the LLM calls of each rollout to the rollout's endpoint.
        url: URL of the service; empty until it accepts requests.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.policy = RolloutPolicies()
        self.url = ""
        self._options = options
        self._listener: socket.socket | None = None
        self._key: str | None = None

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """Reads the service's API key, and opens the port. Blocking.

        Raises:
            UserError: The key is missing, or the port cannot be used.
        """
        with suppress(ImportError):
            import openai as openai  # importing it takes a second; the first submission should not wait for it
        host, port, name = self._options.host, self._options.port, self._options.key_env
        if name is not None:
            self._key = os.environ.get(name, "").strip()
            if not self._key:
                raise PreflightError(
                    f"The environment variable {name} for the key of the service is not set. Run `export {name}=…`."
                )
        elif host not in LOOPBACK:
            raise ConfigError(
                f"Expected a loopback address for a service without a key, got `serve.host={host}`. Set "
                "`serve.key_env=NAME` to the environment variable with a key."
            )
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
            )
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {host}:{port}: {error.strerror or error}. Set another `serve.port`, or "
                "`serve.port=0` for a free port."
            ) from None

    async def train(self, run: TrainedRun) -> None:
        """Serves requests until the run is interrupted.

        Raises:
            OSError: The state of the service could not be stored.
            UserError: The state of an earlier session cannot be read.
        """
        assert self._listener is not None
        with self._listener:
            rollouts = ServedRollouts(
                EpisodeDriver(run), ServiceRecord(run.run_dir.service), self.policy, self._options
            )
            await rollouts.restore()
            watching = asyncio.create_task(rollouts.watch_leases())
            try:
                async with HttpService(rollouts, run, self._key).listening(self._listener):
                    host, port = self._listener.getsockname()[:2]
                    self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                    with suppress(BrokenPipeError):
                        sys.stdout.write(f"Serving rollouts at {self.url}. Ctrl-C ends the service.\n")
                        sys.stdout.flush()
                    await rollouts.failure
            finally:
                watching.cancel()
                await rollouts.close()
