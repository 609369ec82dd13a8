from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.containers.images.dockerfile_check import check_dockerfile, without_syntax_line
from ares_exp.errors import TaskError


def needs(tmp_path: Path, text: str) -> list[str]:
    """`line: feature` of what a Dockerfile needs BuildKit for."""
    (tmp_path / "here.txt").write_text("")
    (tmp_path / "Dockerfile").write_text(text)
    return [f"{one.line}: {one.name}" for one in check_dockerfile(tmp_path / "Dockerfile").features]


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\nRUN echo hi && \\\n  echo there\nCOPY here.txt /x\n",
        "# syntax=docker/dockerfile:1\nFROM a AS b\nFROM c\nCOPY --from=b /gone /x\n",
        "FROM a\nARG F=here.txt\nCOPY $F /x\nCOPY *.md /y/\nCOPY . /z\nADD http://x.test/y /y\n",
        'FROM a\nCOPY ["here.txt", "/x"]\nENTRYPOINT ["sh"]\nHEALTHCHECK NONE\n',
        'FROM a\nRUN echo "<< no here-document" && cat <<< word\n',
        "FROM a\nRUN echo $((1<<2)) $(( 1 <<2 ))\nRUN bash -c \"cat <<EOF\"\nRUN echo ' <<EOF'\n",
        "FROM a\nRUN echo \\\n\n  # COPY --chmod=1 x y\n  go && echo --mount=type=cache\n",
        "FROM --platform=linux/amd64 a\nARG TARGETARCH=amd64\nARG OTHER\nCOPY --chown=1:1 here.txt /x\n",
    ],
)
def test_what_the_classic_builder_may_be_able_to_build_passes(tmp_path: Path, text: str) -> None:
    assert needs(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a\nRUN <<EOF\nFOO\nEOF\nRUN true\n", ["2: a here-document"]),
        ("FROM a\n\nCOPY <<'E' <<-F /x\nls\nE\nFOO\n\tF\nUSER 1\n", ["3: a here-document"]),
        ("FROM a\nRUN true && \\\n\n  cat <<E-1 > /x\nRUN --mount=x y\nE-1\n", ["2: a here-document"]),
        ("FROM a\nRUN cat > /x << 'E F' && ls\nFOO\nE F\nRUN true\n", ["2: a here-document"]),
        ("FROM a\nCOPY << EOF here.txt /x/\nFOO\nEOF\n", ["2: a here-document"]),
        ("FROM a\nRUN --network=none --mount=type=cache,target=/c ls\n", ["2: RUN --network", "2: RUN --mount"]),
        ("FROM a\nrun  --security=insecure ls\nRUN --device=x ls\n", ["2: RUN --security", "3: RUN --device"]),
        ("FROM a\nCOPY --chown=1 --chmod=755 here.txt /x\n", ["2: COPY --chmod"]),
        ("FROM a\nCOPY --link . /x\nCOPY --parents . /x\nCOPY --link . /y\n", ["2: COPY --link", "3: COPY --parents"]),
        ("FROM a\nADD --checksum=sha256:0 http://x.test/y /y\n", ["2: ADD --checksum"]),
        ("FROM --platform=$BUILDPLATFORM a\nARG TARGETOS X=1 TARGETARCH\n",
         ["1: the value of BUILDPLATFORM", "2: the value of TARGETOS", "2: the value of TARGETARCH"]),
    ],
)  # fmt: skip
def test_what_needs_buildkit_is_named_with_its_line(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert needs(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a\nFOO bar\n", r":2: .*FOO"),
        ("FROM a\nCOPY gone.txt /x\n", r":2: .*gone\.txt"),
        ("FROM a\nCOPY --chown=1:1 gone.txt /x\n", r"gone\.txt"),
        ("FROM a\nCOPY --chmod=1 gone.txt /x\n", r"gone\.txt"),
        ("FROM a\nRUN <<E\nls\nE\nFOO\n", r":5: .*FOO"),
    ],
)
def test_what_no_builder_can_build_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(TaskError, match=expected):
        needs(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="Dockerfile"):
        check_dockerfile(tmp_path / "Dockerfile")


@pytest.mark.parametrize(
    ("first_lines", "frontend", "custom"),
    [
        ("# syntax=docker/dockerfile:1.7-labs", "docker/dockerfile:1.7-labs", False),
        ("# escape=\\\n#Syntax = docker.io/docker/dockerfile", "docker.io/docker/dockerfile", False),
        ("# syntax=example.test/nix:1", "example.test/nix:1", True),
        ("# syntax=docker/dockerfile-other", "docker/dockerfile-other", True),
        ("# comment\n# syntax=docker/dockerfile:1", None, False),
        ("\n# syntax=docker/dockerfile:1", None, False),
    ],
)
def test_the_frontend_that_is_asked_for(tmp_path: Path, first_lines: str, frontend: str | None, custom: bool) -> None:
    text = f"{first_lines}\nFROM a\nCOPY --chmod=1 . /x\n"
    (tmp_path / "Dockerfile").write_text(text)
    found = check_dockerfile(tmp_path / "Dockerfile")
    assert (found.frontend, found.custom_frontend) == (frontend, custom)
    assert len(found.features) == 1
    without = without_syntax_line(text)
    assert without.count("\n") == text.count("\n")
    assert ("yntax" in without) == (frontend is None)
