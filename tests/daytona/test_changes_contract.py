"""The contract of captured and restored files on sandboxes, over the real SDK.

Cases about snapshot files on disk are left out: the service keeps the files, and the disk has only the name.
"""

from __future__ import annotations

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.testing.changes_contract import ChangesContract
from tests.daytona.conftest import OnSandboxes


@pytest.mark.docker
@pytest.mark.once
class TestSandboxChanges(OnSandboxes, ChangesContract):
    by_night = frozenset(dir(ChangesContract)) - {"test_eight_from_one"}
    backend = "docker"
    test_every_kind_of_change_comes_back = test_changes_on_top_of_changes = test_a_secret_is_not_captured = None
    test_a_second_capture_reads_what_changed = test_a_change_that_keeps_size_and_time_is_seen = None
    test_a_capture_is_whole_in_whatever_store_it_goes_to = test_captures_at_the_same_time_as_commands = None
    test_containers_that_start_with_the_same_changes_are_independent = None
    test_cancelled_captures = test_a_stop_during_a_capture = test_a_damaged_store = None

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("changes", docker_image="python:3.12-slim")

    @pytest.fixture
    def other_base(self) -> str:
        return "daytona:image=python:3.11-slim"

    async def left(self) -> list[str]:
        return sorted(sandbox.name for sandbox in self._emulator.sandboxes.values())
