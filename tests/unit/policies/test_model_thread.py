"""The thread that owns a model: nothing that is handed over to it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from ares_exp.policies.in_process import batch_engine as engine
from ares_exp.policies.in_process.sampling import Row, Sampling

pytestmark = pytest.mark.train

ROWS = 4_000
AT_ONCE = 4


async def test_rows_added_during_a_batch_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads are at the queue at every moment, and change places many times a millisecond."""

    def generate(model: Any, rows: Sequence[Row], watch: Any) -> None:
        for row in rows:
            row.on_end()

    async def ask_again_and_again() -> int:
        for number in range(ROWS // AT_ONCE):
            row = Row([number], Sampling(max_tokens=1))
            ended = await thread.generate(row, timeout_sec=20, on_wait=lambda _: None)
            assert ended.kept == [number]
        return number + 1

    monkeypatch.setattr(engine, "generate", generate)
    thread = engine.ModelThread(
        lambda: Any,
        version=None,
        max_batch_size=AT_ONCE,
        batch_wait_sec=0,
        watch=lambda *_: contextlib.nullcontext(),
        on_end=lambda row: list(row.prompt),
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        assert sum(await asyncio.gather(*(ask_again_and_again() for _ in range(AT_ONCE)))) == ROWS
    finally:
        sys.setswitchinterval(before)
        await thread.close()
