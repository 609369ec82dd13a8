"""No secret reaches the disk, the terminal, or W&B's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.loopback_endpoint import LoopbackEndpoint

KEY = "sk-very-secret-key-0123456789"
TYPED = "typed-secret-value"


@pytest.mark.local
def test_no_secret_is_written_anywhere(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    done = cli(
        "policy=chat_completions",
        "policy.model=m",
        f"policy.base_url={endpoint.url}",
        f"+policy.extra_body.api_token={TYPED}",
        "env.limit=1",
        env={"OPENAI_API_KEY": KEY},
    )
    assert done.returncode == 0, done.stderr
    assert endpoint.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert endpoint.requests[0].body["api_token"] == TYPED
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        assert KEY.encode() not in content, path
        assert TYPED.encode() not in content, path
    assert KEY not in done.stdout + done.stderr
