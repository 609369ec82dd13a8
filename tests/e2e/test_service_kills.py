"""A rollout service and its trainer are killed; `tests/soak/service_kills.py` does it 200 times."""

import pytest

from tests.soak import service_kills
from tests.unit.containers.local_containers import needs_local

pytestmark = [needs_local, pytest.mark.local]


def test_killed_service_and_trainer_lose_nothing() -> None:
    service_kills.main(kills=3, seed=3)
