from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.errors import TaskError
from ares_exp.tasks.instruction import read_instruction, strip_canary
from ares_exp.tasks.verification.link_bounds import LinkBounds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<!-- harbor-canary GUID 1 -->\nDo it.\n", "Do it.\n"),
        ("<!-- canary --> Do it.", "<!-- canary --> Do it."),
        ("\n# canary\nDo it.", "# canary\nDo it."),
        ("# canary\n\n# canary\nDo it.", "# canary\nDo it."),
        ("# canary", ""),
    ],
)
def test_canary_lines_are_dropped(text: str, expected: str) -> None:
    assert strip_canary(text) == expected


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "instruction.md").write_bytes(b"\xff")
    with pytest.raises(TaskError, match="UTF-8"):
        read_instruction(tmp_path / "instruction.md", LinkBounds(tmp_path))
