"""A Ray cluster of several nodes on this machine, as tests start, harm and end it."""

import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_health_check_initial_delay_ms": "0",
}
"""Of the processes of a cluster: few of them, and deaths that are noticed soon."""
OBJECT_STORE_BYTES = 80 * 2**20
STARTS = 8


class SmallCluster:
    """A head without slots, and nodes that can be added and killed.

    Attributes:
        address: Address to which drivers connect.
        nodes: The living nodes but the head.
    """

    def __init__(self, nodes: int, **head: Any) -> None:
        """Starts the head, with more arguments for it, and so many nodes."""
        self._folder = tempfile.TemporaryDirectory(prefix="r", dir="/tmp")  # paths of sockets are short
        self._before = dict(os.environ)
        os.environ |= ENVIRONMENT | {"RAY_TMPDIR": self._folder.name}
        from ray.cluster_utils import Cluster

        head |= {
            "num_cpus": 0,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
        }
        self._cluster = _patiently(lambda ports: Cluster(initialize_head=True, head_node_args={**head, **ports}))
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Any:
        """Adds a node. In the main thread: Ray sets signal handlers."""
        return self.add_node()

    def add_node(self, **arguments: Any) -> Any:
        node = _patiently(
            lambda ports: self._cluster.add_node(
                num_cpus=1,
                resources=self._resources(),
                object_store_memory=OBJECT_STORE_BYTES,
                wait=False,
                **arguments,
                **ports,
            )
        )
        self.nodes.append(node)
        return node

    def _resources(self) -> dict[str, float]:
        """Node 0 has `upto1`, `upto2`, …; node 1 has `upto2`, …: with them a run uses only the first nodes."""
        return {"run": 1000, **{f"upto{count}": 1000 for count in range(len(self.nodes) + 1, 4)}}

    def cut_power(self, node: Any) -> None:
        """Kills a node with all that runs on it, at once."""
        self.nodes.remove(node)
        raylet = psutil.Process(_raylet(node).pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._forget(node)

    def kill_raylet(self, node: Any) -> None:
        self.nodes.remove(node)
        _raylet(node).kill()
        self._forget(node)

    def _forget(self, node: Any) -> None:
        _raylet(node).wait()  # a zombie counts as alive to its workers
        self._cluster.worker_nodes.discard(node)
        with contextlib.suppress(Exception):
            node.kill_all_processes(check_alive=False, allow_graceful=False)

    def hosts(self, node: Any | None = None) -> list[psutil.Process]:
        found = []
        for one in self.nodes if node is None else [node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(_raylet(one).pid).children(recursive=True)
                found += [child for child in children if _is_host(child)]
        return found

    def close(self) -> None:
        self._cluster.shutdown()
        self._folder.cleanup()
        os.environ.clear()
        os.environ.update(self._before)


def _ports() -> dict[str, int]:
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    with contextlib.ExitStack() as open_until_all_are_chosen:
        sockets = [open_until_all_are_chosen.enter_context(socket.socket()) for _ in names]
        for one in sockets:
            one.bind(("", 0))
        return {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}


@contextlib.contextmanager
def _known(ports: Mapping[str, int]) -> Iterator[None]:
    """Writes the ports where a node looks for them: it gives its parts 15 s to do so, too few on a busy machine."""
    from ray._private.node import Node

    start = Node.start_ray_processes

    def told(self: Any) -> None:
        for name, port in ports.items():
            (Path(self.get_session_dir_path()) / f"{name}_{self.node_id}").write_text(str(port))
        start(self)

    Node.start_ray_processes = told
    try:
        yield
    finally:
        Node.start_ray_processes = start


def _patiently(start: Callable[[dict[str, int]], Any]) -> Any:
    """Starts a part of a cluster with its ports; Ray gives it 30 s, which may be too short on a busy machine."""
    own = psutil.Process()
    before = set(own.children())
    for _ in range(STARTS):
        ports = _ports()
        try:
            with _known(ports):
                return start(ports)
        except Exception as error:
            failure = error
            for child in set(own.children()) - before:
                child.kill()
    raise failure


def _raylet(node: Any) -> Any:
    return node.all_processes["raylet"][0].process


def _is_host(process: psutil.Process) -> bool:
    try:
        return any("HostProcess" in word for word in process.cmdline())
    except psutil.Error:
        return False
