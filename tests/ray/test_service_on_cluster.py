"""The contract of the rollout service with episodes on a cluster."""

from typing import Any

import pytest

from tests.ray.cluster import SmallCluster
from tests.ray.runs import on
from tests.service_contract import ServiceContract


class TestServiceOnCluster(ServiceContract):
    by_night = frozenset(dir(ServiceContract)) - {  # the daily run has them in `test_service.py`
        *("test_episodes_come_once_in_order", "test_cancel_releases_containers", "test_failures_have_no_reward"),
        *("test_pause_stops_clocks_and_ends", "test_resumed_service_loses_and_repeats_nothing"),
    }

    @pytest.fixture(autouse=True)
    def on_cluster(self, cluster: SmallCluster, place: Any) -> None:
        self.overrides = on(cluster)
