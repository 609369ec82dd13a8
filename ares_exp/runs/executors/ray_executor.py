"""The executor for Ray (`executor=ray`), which runs environments in hosts on the nodes of a Ray cluster.

A host is a Ray actor with async methods that is bound to one node. Ray only starts the hosts, calls their methods, and
lists the nodes. `RemoteHost` and `EnvironmentHost` detect lost connections. Only this module imports Ray, when it
connects.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import pydantic.dataclasses
from pydantic import Field

from ares_exp.cancellation import cancel_all, finish, in_daemon_thread
from ares_exp.environments.source import EpisodeParts, Report, SourceBase
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.records.run_dir import resume_command
from ares_exp.records.terminal_text import shown_path
from ares_exp.runs.executors.environment_host import HostProcess
from ares_exp.runs.executors.executor import Executor, Place, RunPlan
from ares_exp.runs.executors.placement import Placement
from ares_exp.runs.executors.remote_host import RemoteEnvironment, RemoteHost, without_factories

NODES_INTERVAL_SEC = 1.0
"""Interval between two checks of the cluster's nodes, in seconds."""
RESTART_SEC = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Delays in seconds before a host is started again on a node, after the first, second and later failures in a row."""
CONNECT_SEC = 180.0
"""Time limit for connecting to the cluster, in seconds.

Needed because Ray keeps trying, even if no process listens at the address. The limit is long, because a local cluster
takes more than a minute to start on a loaded machine.
"""
RESPONSE_SEC = 30.0
"""Time limit of a call to Ray during the run, in seconds."""
LEAVE_SEC = 15.0
"""Time limit for disconnecting from the cluster, in seconds."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False, config=pydantic.ConfigDict(extra="forbid"))
class RayExecutor(Executor):
    """Starts hosts on the nodes of a Ray cluster, including nodes that join later, and places environments on them.

    Attributes:
        address: Address of the cluster: `auto` (a cluster on this machine) or `host:6379`. `None` uses the variable
            `RAY_ADDRESS` or, if it is not set, starts a local cluster that is stopped at the end of the run.
        episodes_per_host: Maximum number of concurrent environments on a host.
        hosts_per_node: Number of hosts on each node. If a host ends, only the environments on it are lost.
        resources: Ray resources that each host reserves on its node, such as `{docker: 1}`. Only nodes with these
            resources get hosts. `None` reserves nothing.
        num_cpus: Number of CPUs that Ray reserves for a host.
        lease_sec: Number of seconds without contact between a host and the run. After this time, the run gives up the
            host, and the host ends itself.
        lost_per_attempt: Number of lost hosts after which an attempt ends with an error, because it may be the cause.
            The more hosts an attempt has lost, the fewer environments share its next host.
        storage: Transfer of episode files to the run directory: `shared` (nodes write to it), `stream` (hosts send the
            files), or `auto` (chosen for each host).
        join_timeout_sec: Time limit in seconds for the start of a host, including its checks of tasks and containers.
        no_node_timeout_sec: Maximum time in seconds that the run waits while all hosts are lost.
    """

    address: str | None = None
    episodes_per_host: Count = 64
    hosts_per_node: Count = 1
    resources: dict[str, float] | None = None
    num_cpus: Annotated[float, Field(ge=0)] = 0
    lease_sec: Seconds = 60.0
    lost_per_attempt: Count = 3
    storage: Literal["auto", "shared", "stream"] = "auto"
    join_timeout_sec: Seconds = 120.0
    no_node_timeout_sec: Seconds = 1800.0

    def __post_init__(self) -> None:
        """Creates the executor without a connection."""
        self._placement: Placement[RemoteHost] = Placement()
        self._nodes: dict[str, _Node] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ran: RunPlan
        self._report: Report
        self._prepare_arguments: tuple[Any, ...] = ()
        self._seen_file: Path | None = None
        self._hosts_lost = 0
        self._ray: Any = None
        self._is_private = False
        self._has_left: threading.Event | None = None

    def checks(self, source: SourceBase, parts: EpisodeParts) -> Sequence[Coroutine[Any, Any, None]]:
        """Returns a check that connects to the cluster. Each host later checks its own container backend and agent."""
        return (self._connect(),)

    async def open(self, ran: RunPlan, report: Report) -> None:
        """Starts hosts on the nodes, and returns when the first host is ready. Other hosts can become ready later.

        Raises:
            PreflightError: No node can run the tasks. The message contains the reason for each node.
            ConfigError: Some components of the run were passed as objects, which other processes cannot create.
        """
        if ran.recipe is None:
            raise ConfigError(
                "Other processes must create the components of this run, but some components were passed as objects. "
                "Pass the names of options instead, or use `executor=local`."
            )
        self._ran, self._report = ran, report
        digests = await asyncio.to_thread(lambda: {name: ran.source.digest(name) for name in ran.task_names})
        if ran.run_dir is not None and self.storage != "stream":
            # The name is random, so a node that can read the file shares the run directory.
            self._seen_file = (ran.run_dir / f".seen-by-nodes-{secrets.token_hex(16)}").absolute()
            await asyncio.to_thread(self._seen_file.touch)
        self._prepare_arguments = ran.recipe, digests, without_factories(ran.parts), self._seen_file
        self._spawn(self._tend())
        try:
            async with asyncio.timeout(self.join_timeout_sec):
                await self._placement.wait_for(lambda: bool(self._placement.hosts) or self._all_refused)
        except TimeoutError:
            raise PreflightError(self._why_none(f"was ready within {self.join_timeout_sec:g} s")) from None
        if not self._placement.hosts:
            raise PreflightError(self._why_none("can run these tasks"))

    @asynccontextmanager
    async def room(self, task_name: str, *, losses: int = 0) -> AsyncIterator[Place]:
        """Waits for a free slot on a host, and reserves this slot during the block.

        Raises:
            PreflightError: All hosts were lost for longer than `no_node_timeout_sec`, or the run's own cluster has
                died.
        """
        may_be_blamed = losses + 1 >= self.lost_per_attempt
        async with self._placement.slot(task_name, losses=losses) as host:
            yield lambda source, task_name, parts: RemoteEnvironment(host, task_name, parts, may_be_blamed)

    def figures(self) -> Mapping[str, float]:
        """Returns the numbers of hosts, lost hosts and slots, and the longest round-trip time of a host, in seconds."""
        hosts = self._placement.hosts
        return {
            "system/hosts": len(hosts),
            "system/hosts_lost": self._hosts_lost,
            "system/slots": self._placement.slots,
            "system/host_round_trip_sec": max((host.round_trip_sec for host in hosts), default=0.0),
        }

    async def close(self) -> None:
        """Ends the hosts, and disconnects from the cluster. Idempotent."""
        await finish(self._close())

    async def _close(self) -> None:
        await cancel_all(*self._tasks)
        if self._seen_file is not None:
            self._seen_file.unlink(missing_ok=True)
        if self._has_left is None:
            return
        try:
            await _ask_ray(self._ray.shutdown, within_sec=LEAVE_SEC)
        except TimeoutError:
            atexit.unregister(self._ray.shutdown)  # the exit handler would wait again
            logger.warning("Ray did not leave the cluster within %g s. The run ends anyway.", LEAVE_SEC)
        finally:
            self._has_left.set()
            self._has_left = None

    # The cluster

    async def _connect(self) -> None:
        """Connects to the cluster or starts a local one. Uses a thread, so that Ray keeps the run's signal handlers."""
        try:
            import ray
        except ImportError as error:
            raise PreflightError(
                f"`executor=ray` needs Ray, which cannot be imported ({error}). Install it: "
                "`pip install 'ares-exp[ray]'` (Ray supports Python up to 3.14), or use `executor=local`."
            ) from error
        self._ray = ray
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        if ray.is_initialized():
            return
        logging.getLogger("ray").setLevel(logging.ERROR)  # Ray would warn about signal handlers
        has_left = threading.Event()
        try:
            cluster = urlsplit(address if "://" in address else f"//{address}")
            if cluster.port is not None:
                async with asyncio.timeout(RESPONSE_SEC):
                    _, writer = await asyncio.open_connection(cluster.hostname, cluster.port)
                writer.close()
            await _ask_ray(
                lambda: ray.init(address=address, log_to_driver=False, configure_logging=False, **options),
                within_sec=CONNECT_SEC,
                thread_stays_until=has_left,
            )
        except (Exception, SystemExit) as error:
            has_left.set()
            raise PreflightError(
                f"Expected a Ray cluster at {address!r}, but none responds ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:500]}). Start one (`ray start --head`), or set its address "
                "with `executor.address=host:6379` or RAY_ADDRESS."
            ) from error
        self._has_left, self._is_private = has_left, address == "local"

    async def _tend(self) -> None:
        """Checks the nodes every second: starts hosts on new nodes, and gives up the hosts of nodes that are gone.

        Makes waiting episodes fail if all hosts stay lost for too long.
        """
        empty_since: float | None = None
        while True:
            try:
                self._follow(await _ask_ray(self._ray.nodes, within_sec=RESPONSE_SEC))
                has_ended = self._is_private and not self._nodes
            except Exception:  # the head node may be temporarily unreachable
                has_ended = self._is_private
            now = time.monotonic()
            if self._placement.hosts or not self._hosts_lost:
                empty_since = None
            elif has_ended:
                folder = self._ran.run_dir or Path("RUN")
                resume = resume_command(folder, shown_path(folder))
                self._placement.give_up(
                    PreflightError(f"The Ray cluster of this run has ended. Use `{resume}` to continue the run.")
                )
            elif empty_since is None:
                empty_since = now
                logger.warning("All nodes with environments are lost. The run waits until another node is available.")
            elif now - empty_since > self.no_node_timeout_sec:
                why = f"was available for {self.no_node_timeout_sec:g} s. Use `resume=` to continue the run"
                self._placement.give_up(PreflightError(self._why_none(why)))
            await asyncio.sleep(NODES_INTERVAL_SEC)

    @property
    def _all_refused(self) -> bool:
        return bool(self._nodes) and all(node.refusal is not None for node in self._nodes.values())

    def _follow(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        alive = {str(one["NodeID"]): one for one in nodes if one["Alive"] and self._fits(one)}
        for node_id in self._nodes.keys() - alive.keys():
            gone = self._nodes.pop(node_id)
            for host in [one for one in self._placement.hosts if one.node == gone.name]:
                host.lose("its node is gone")
        for node_id in alive.keys() - self._nodes.keys():
            name = str(alive[node_id].get("NodeManagerHostname") or node_id)
            node = self._nodes[node_id] = _Node(node_id, f"{name} ({node_id[:8]})")
            for _ in range(self.hosts_per_node):
                self._spawn(self._keep_host(node))

    def _fits(self, node: Mapping[str, Any]) -> bool:
        return all(node["Resources"].get(name, 0) >= amount for name, amount in (self.resources or {}).items())

    async def _keep_host(self, node: _Node) -> None:
        """Starts a host on a node, and starts a new one whenever it ends.

        Stops if the node cannot run the tasks or is gone.
        """
        failed = 0
        while node.refusal is None and self._nodes.get(node.node_id) is node:
            try:
                async with self._host(node) as host:
                    self._placement.add(host, node.name.partition(" ")[0], self.episodes_per_host)
                    since = time.monotonic()
                    await asyncio.wait({host.has_ended})
                    self._hosts_lost += 1
                    logger.warning(
                        "The host of environments on %s is lost: %s. Its episodes continue elsewhere.",
                        *(node.name, host.why_lost),
                    )
                if time.monotonic() - since > RESTART_SEC[-1]:
                    failed = 0
            except (ConfigError, PreflightError) as error:
                node.refusal = str(error)
                self._report(f"The node {node.name} runs no environments: {error}")
                self._placement.tell()
                return
            except Exception as error:
                node.trouble = f"{type(error).__name__}: {error}"
                logger.info("The process that runs environments could not be started on %s", node.name, exc_info=error)
            await asyncio.sleep(RESTART_SEC[min(failed, len(RESTART_SEC) - 1)])
            failed += 1

    @asynccontextmanager
    async def _host(self, node: _Node) -> AsyncIterator[RemoteHost]:
        """Starts a host on a node and prepares it. Ends it after the block, even if only its connection broke."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor_class = self._ray.remote(HostProcess).options(
            num_cpus=self.num_cpus,
            resources=self.resources,
            max_restarts=0,
            max_concurrency=100_000,
            enable_task_events=False,  # Ray would record every call
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        )
        host = RemoteHost(
            ray=self._ray,
            actor=actor_class.remote(self.lease_sec),
            node=node.name,
            models={model.key: model for model in self._ran.source.own_models},
            lease_sec=self.lease_sec,
            on_lost=self._placement.remove,
        )
        try:
            async with asyncio.timeout(self.join_timeout_sec):
                await host.start()  # starting the process can take longer than the lease
                warnings, shares_disk = await host.call("prepare", *self._prepare_arguments)
            if not shares_disk and self.storage == "shared":
                raise PreflightError("it cannot access the run directory, which `executor.storage=shared` requires.")
            if not shares_disk and self._ran.needs_shared_disk is not None:
                raise PreflightError(
                    f"it does not share the run directory, and {self._ran.needs_shared_disk}. Put the run directory on "
                    "a disk that all nodes share, or remove this setting."
                )
            for warning in warnings:
                self._report(warning)
            logger.info("The process that runs environments is ready on %s.", node.name)
            yield host
        finally:
            await finish(host.close())

    def _why_none(self, what: str) -> str:
        reasons = [f"{node.name}: {node.refusal or node.trouble or 'it is not ready'}" for node in self._nodes.values()]
        nodes = "; ".join(reasons) or f"There are no nodes{f' with {self.resources}' if self.resources else ''}."
        return f"No node of the Ray cluster {what}. {nodes}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(eq=False, slots=True)
class _Node:
    """A node of the cluster.

    Attributes:
        node_id: Ray's id of the node.
        name: Name of the node in messages.
        refusal: Reason why the node cannot run the tasks; `None` if it can, as far as is known.
        trouble: Reason why the last start of a host on the node failed; `None` if no start failed.
    """

    node_id: str
    name: str
    refusal: str | None = None
    trouble: str | None = None


async def _ask_ray(call: Callable[[], T], *, within_sec: float, thread_stays_until: threading.Event | None = None) -> T:
    """Calls Ray in a daemon thread, because some calls never return if the cluster is broken.

    When the thread ends, Linux kills the processes that `call` has started, such as a local cluster. To keep these
    processes running, pass an event as `thread_stays_until`, which ends the thread when it is set.
    """
    async with asyncio.timeout(within_sec):
        return await in_daemon_thread(call, thread_stays_until)
