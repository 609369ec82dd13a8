"""The contract of verification on sandboxes of the emulator, which are local containers."""

import pytest

from tests.reward_contract import RewardContract

pytestmark = [pytest.mark.local, pytest.mark.once, pytest.mark.root]


class TestDaytonaRewards(RewardContract):
    """The fixture `factory` is the one of this folder."""
