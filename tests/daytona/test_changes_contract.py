"""The contract of captured and restored files on sandboxes, over the real SDK.

Cases about snapshot files on disk are left out: the service keeps the files, and the disk has only the name.
"""

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.testing.changes_contract import ChangesContract
from tests.daytona.conftest import OnSandboxes


@pytest.mark.docker
@pytest.mark.once
class TestSandboxChanges(OnSandboxes, ChangesContract):
    by_night = frozenset(dir(ChangesContract)) - {"test_eight_containers_restore_one_capture"}
    backend = "docker"
    test_every_kind_of_change_round_trips = test_changes_accumulate_across_captures = test_secret_is_not_captured = None
    test_second_capture_reads_only_changes = test_change_with_same_size_and_time_is_detected = None
    test_capture_is_complete_in_any_store = test_captures_and_commands_run_concurrently = None
    test_containers_with_same_changes_are_independent = None
    test_cancelled_captures_leave_no_resources = test_stop_during_capture_leaves_no_resources = (
        test_damaged_store_is_refused
    ) = None

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("changes", docker_image="python:3.12-slim")

    @pytest.fixture
    def other_base(self) -> str:
        return "daytona:image=python:3.11-slim"

    async def left(self) -> list[str]:
        return sorted(sandbox.name for sandbox in self._emulator.sandboxes.values())
