from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.containers.docker.dockerfile_check import check_dockerfile
from ares_exp.errors import TaskError, UnsupportedTaskError


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\nRUN echo hi && \\\n  echo there\nCOPY here.txt /x\n",
        "# syntax=docker/dockerfile:1\nFROM a AS b\nFROM c\nCOPY --from=b /gone /x\n",
        "FROM a\nARG F=here.txt\nCOPY $F /x\nCOPY *.md /y/\nCOPY . /z\nADD http://x.test/y /y\n",
        'FROM a\nCOPY ["here.txt", "/x"]\nENTRYPOINT ["sh"]\nHEALTHCHECK NONE\n',
        'FROM a\nRUN echo "<< no here-document" && cat <<< word\n',
    ],
)
def test_what_the_engine_may_be_able_to_build_passes(tmp_path: Path, text: str) -> None:
    (tmp_path / "here.txt").write_text("")
    (tmp_path / "Dockerfile").write_text(text)
    check_dockerfile(tmp_path / "Dockerfile")


@pytest.mark.parametrize(
    ("text", "error", "expected"),
    [
        ("FROM a\nRUN <<EOF\nls\nEOF\n", UnsupportedTaskError, r":2: a here-document needs BuildKit"),
        ("FROM a\n\nCOPY <<'E' /x\nls\nE\n", UnsupportedTaskError, r":3: a here-document"),
        ("FROM a\nRUN --mount=type=cache,target=/c ls\n", UnsupportedTaskError, r"--mount"),
        ("FROM a\nCOPY --chown=1 --chmod=755 x /x\n", UnsupportedTaskError, r"--chmod"),
        ("FROM a\nFOO bar\n", TaskError, r":2: .*FOO"),
        ("FROM a\nCOPY gone.txt /x\n", TaskError, r":2: .*gone\.txt"),
        ("FROM a\nCOPY --chown=1:1 gone.txt /x\n", TaskError, r"gone\.txt"),
    ],
)
def test_what_it_cannot_build_is_named_with_its_line(
    tmp_path: Path, text: str, error: type[Exception], expected: str
) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(error, match=expected):
        check_dockerfile(tmp_path / "Dockerfile")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="Dockerfile"):
        check_dockerfile(tmp_path / "Dockerfile")
