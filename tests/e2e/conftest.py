from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.loopback_endpoint import LoopbackEndpoint, answer

SUBMIT = "Done.\n\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```\n"


@pytest.fixture
def endpoint() -> Iterator[LoopbackEndpoint]:
    """A chat-completions server whose model submits at once."""
    with LoopbackEndpoint(otherwise=answer(SUBMIT)) as server:
        yield server
