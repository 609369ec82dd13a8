"""What an engine's description of itself becomes in a request, without an engine."""

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.engine import Capabilities, capabilities_of, has_disk_quota, limits, unenforced
from ares_exp.errors import UnsupportedTaskError

XFS = {"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "xfs"]], "DockerRootDir": "/data/docker"}
ROOT = "/dev/vda / ext4 rw,relatime 0 0\n"


@pytest.mark.parametrize(
    ("info", "mounts", "expected"),
    [
        (XFS, f"{ROOT}/dev/vdb /data xfs rw,prjquota 0 0\n", True),
        (XFS, f"{ROOT}/dev/vdb /data/docker xfs rw,pquota 0 0\n", True),
        (XFS, f"{ROOT}/dev/vdb /data xfs rw,noquota 0 0\n", False),
        (XFS, "/dev/vda / xfs rw,prjquota 0 0\n/dev/vdb /data xfs rw 0 0\n", False),
        (XFS, "/dev/vda / xfs rw,prjquota 0 0\n/dev/vdb /database xfs rw 0 0\n", True),
        (XFS, "", False),
        (
            XFS | {"DriverStatus": [["Backing Filesystem", "extfs"]]},
            f"{ROOT}/dev/vdb /data xfs rw,prjquota 0 0\n",
            False,
        ),
        ({"Driver": "btrfs"}, ROOT, True),
        ({"Driver": "zfs", "DriverStatus": None}, "", True),
        ({"Driver": "io.containerd.snapshotter.v1"}, ROOT, False),
    ],
)
def test_disk_quota_is_sent_if_supported(info: dict[str, object], mounts: str, expected: bool) -> None:
    assert has_disk_quota(info, mounts) is expected


def test_cpus_are_capped_at_the_machines() -> None:
    sent = limits(ContainerSpec("t", cpus=10_000, memory_mb=2), Capabilities(cpus=2), swap_mb=0, pids_limit=9)
    assert (sent["nano_cpus"], sent["memswap_limit"]) == (2 * 10**9, sent["mem_limit"])


def test_storage_size_is_sent_if_supported() -> None:
    spec = ContainerSpec("t", storage_mb=10)
    assert limits(spec, Capabilities(disk_quota=True), swap_mb=0, pids_limit=9)["storage_opt"] == {"size": "10m"}
    assert limits(spec, Capabilities(), swap_mb=0, pids_limit=9) == {"pids_limit": 9}
    assert unenforced(spec, Capabilities(disk_quota=True)) == []
    assert "storage_mb=10" in unenforced(spec, Capabilities())[0]


def test_gpus_use_the_nvidia_runtime() -> None:
    can = capabilities_of({"NCPU": 8, "Driver": "overlay2", "Runtimes": {"runc": {}, "nvidia": {}}})
    sent = limits(ContainerSpec("t", gpus=3), can, swap_mb=0, pids_limit=9)["device_requests"]
    assert sent == [{"Driver": "", "Count": 3, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}]


def test_gpus_use_cdi() -> None:
    names = ["nvidia.com/gpu=0", "nvidia.com/gpu=1", "nvidia.com/gpu=all", "vendor.com/net=0"]
    info = {"NCPU": 8, "Driver": "overlay2", "DiscoveredDevices": [{"Source": "cdi", "ID": name} for name in names]}
    can = capabilities_of(info)
    sent = limits(ContainerSpec("t", gpus=2), can, swap_mb=0, pids_limit=9)["device_requests"]
    assert (sent[0]["Driver"], sent[0]["DeviceIDs"], sent[0]["Count"]) == (
        "cdi",
        ["nvidia.com/gpu=0", "nvidia.com/gpu=1"],
        0,
    )
    with pytest.raises(UnsupportedTaskError, match="t needs 3 GPUs, but the Docker engine has only 2"):
        unenforced(ContainerSpec("t", gpus=3), can)


def test_missing_gpus_are_refused() -> None:
    with pytest.raises(UnsupportedTaskError, match="t needs 1 GPU, but the Docker engine has neither"):
        unenforced(ContainerSpec("t", gpus=1), Capabilities())
    assert unenforced(ContainerSpec("t", gpus=0), Capabilities()) == []
