"""Nodes cut off from the network while runs are run on them: when do their containers end?

`python -m tests.soak.cluster_cuts [CUTS] [LEASE]`, as root: each node of the cluster is in a network namespace of its
own, and a cut drops every packet to it and from it, without a word to either side; nothing on the node is harmed. It
prints a line for each cut: after how many seconds the containers of the node's host, and the host, had ended. They may
take the lease and five seconds. After each run everything is checked that `tests/ray` checks after one fault.
"""

import contextlib
import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from tests.ray.cluster import SmallCluster
from tests.soak.cluster_faults import BOX_SEC, Harm, boxes_in, living, soak

NODES = 2
SUBNET = "10.213.77"
HEAD = f"{SUBNET}.1"
CLONE_NEWNET = 0x40000000


class CutCluster(SmallCluster):
    """A cluster whose nodes are in separate networks."""

    def __init__(self, nodes: int) -> None:
        self._numbers = count(2)
        self._networks: dict[Any, str] = {}
        self._bridge = f"ares{os.getpid()}"
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{HEAD}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        super().__init__(nodes, node_ip_address=HEAD)

    def add(self) -> Any:
        number = next(self._numbers)
        name, link, address = f"{self._bridge}-{number}", f"ar{os.getpid()}v{number}", f"{SUBNET}.{number}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", link, "master", self._bridge, "up")
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", name, "link", "set", device, "up")
        with within(name):
            node = self.add_node(node_ip_address=address)
        self._networks[node] = name
        return node

    def cut_off(self, node: Any) -> None:
        for chain, interface in (("INPUT", "-i"), ("OUTPUT", "-o")):
            rule = ("iptables", "-I", chain, interface, "eth0", "-j", "DROP")
            run("ip", "netns", "exec", self._networks[node], *rule)

    def forget(self, node: Any) -> None:
        """Removes the remains of a node, and its network."""
        self.cut_power(node)
        run("ip", "netns", "del", self._networks.pop(node))

    def close(self) -> None:
        super().close()
        for name in self._networks.values():
            run("ip", "netns", "del", name)
        run("ip", "link", "del", self._bridge)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def within(network: str) -> Iterator[None]:
    """Has processes that this thread starts live in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as before, Path(f"/var/run/netns/{network}").open() as inside:
        if libc.setns(inside.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(before.fileno(), CLONE_NEWNET)


class Cuts(Harm):
    """Cuts nodes off while runs are run on them."""

    lease_sec = 20.0

    def do(self, what: str, node: Any) -> None:
        [host] = self._cluster.hosts(node)
        boxes = set(boxes_in(host))
        started = time.monotonic()
        self._cluster.cut_off(node)
        ended = {"containers": lambda: not living(boxes), "host": lambda: not host.is_running() or _is_dead(host)}
        at: dict[str, float] = {}
        while ended.keys() - at.keys() and time.monotonic() - started < 3 * self.lease_sec:
            at |= {name: time.monotonic() - started for name in ended.keys() - at.keys() if ended[name]()}
            time.sleep(0.1)
        after = at.get("containers", float("inf"))
        self.left += boxes if after > self.lease_sec + BOX_SEC else ()
        print(
            f"lease {self.lease_sec:g} s: {len(boxes)} processes in containers had ended {after:.1f} s after the cut "
            f"({after - self.lease_sec:+.1f} s), the host after {at.get('host', float('inf')):.1f} s",
            flush=True,
        )
        self._cluster.forget(node)


def _is_dead(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def main(cuts: int, lease_sec: float) -> int:
    cluster = CutCluster(NODES)
    harm = Cuts(cluster, ["cut"] * cuts, random.Random(0))
    harm.lease_sec = lease_sec
    return soak(cluster, harm, lease_sec)


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    raise SystemExit(main(*(int(given[0]) if given else 5, given[1] if len(given) > 1 else 20.0)))
