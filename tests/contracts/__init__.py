"""Suites that any implementation of a protocol can run."""

import pytest

pytest.register_assert_rewrite("tests.contracts.container_contract", "tests.contracts.changes_contract")
