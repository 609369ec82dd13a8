"""The contract of the rollout service with episodes on a cluster."""

from typing import Any

import pytest

from tests.ray.cluster import SmallCluster
from tests.ray.runs import on
from tests.service_contract import ServiceContract


class TestServiceOnCluster(ServiceContract):
    @pytest.fixture(autouse=True)
    def on_cluster(self, cluster: SmallCluster, place: Any) -> None:
        self.overrides = on(cluster)
