"""The image plan of a sandbox: its base, the files of the context, and the steps after the start."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec, ExecResult, Mount
from ares_exp.containers.daytona.sandbox_request import DaytonaOptions, create_params
from ares_exp.containers.images.image_plan import ImagePlan, plan_image
from ares_exp.errors import ContainerStartError, TaskError, UnsupportedTaskError


def spec(context: Path, dockerfile: str, **files: str) -> ContainerSpec:
    """A task with that Dockerfile, and files whose names have `__` for `/`."""
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        path = context / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ContainerSpec(name="t", context_dir=context)


def plan(context: Path, dockerfile: str, **files: str) -> ImagePlan:
    return plan_image(spec(context, dockerfile, **files))


def files_of(planned: ImagePlan) -> list[str]:
    assert planned.local.not_stored is None
    return sorted(planned.local.files)


def test_snapshot_replaces_the_task_image_and_warns(tmp_path: Path) -> None:
    task = spec(tmp_path, "FROM x\nCOPY a /a\n")
    planned = plan_image(task, "team/base")
    assert (planned.snapshot, planned.image, planned.dockerfile) == ("team/base", None, None)
    assert planned.after_start() is planned
    for part in (str(tmp_path / "Dockerfile"), "container.snapshot=team/base"):
        assert part in planned.warnings[0]
    assert plan_image(ContainerSpec(name="t"), "s").warnings == ()


@pytest.mark.parametrize(
    ("image", "is_fixed"),
    [
        ("debian:12", True),
        ("reg.example:5000/a/b:v1", True),
        ("debian@sha256:" + "0" * 64, True),
        ("debian", False),
        ("debian:latest", False),
        ("reg.example:5000/a/b", False),
    ],
)
def test_image_is_used_unchanged(image: str, is_fixed: bool) -> None:
    planned = plan_image(ContainerSpec(name="t", docker_image=image))
    assert (planned.image, planned.dockerfile, planned.user, planned.workdir) == (image, None, "root", None)
    assert not planned.env
    assert (planned.warnings == ()) == is_fixed


@pytest.mark.parametrize("image", [None, "", "a b", "debian\nRUN x", "$IMAGE"])
def test_invalid_image_is_refused(image: str | None) -> None:
    with pytest.raises(TaskError, match="docker_image"):
        plan_image(ContainerSpec(name="t", docker_image=image))


@pytest.mark.parametrize("snapshot", [None, "s"])
def test_compose_is_refused(tmp_path: Path, snapshot: str | None) -> None:
    spec = ContainerSpec(name="t", docker_image="debian:12", compose_file=tmp_path / "docker-compose.yaml")
    with pytest.raises(UnsupportedTaskError, match="several services"):
        plan_image(spec, snapshot)


WITHOUT_FILES = """\
# syntax=docker/dockerfile:1
ARG V=12
FROM golang:1 AS build
WORKDIR /src
USER builder
ENV STAGE=1
RUN --mount=type=cache,target=/c go build
FROM debian:$V
ENV A=1 LD_LIBRARY_PATH=/x${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
WORKDIR /app
COPY --from=build /src/x /x
RUN --mount=type=bind,from=build,source=d,target=/d make
ONBUILD COPY no /x
COPY <<EOF /etc/conf
COPY not/there /x
EOF
ADD https://example.org/x.tgz git@example.org:a/b.git /y/
RUN <<EOF
COPY neither /x
EOF
WORKDIR sub
USER app
ENTRYPOINT ["/x"]
"""


def test_dockerfile_without_files_is_sent_unchanged(tmp_path: Path) -> None:
    planned = plan(tmp_path, WITHOUT_FILES)
    assert planned.local is None
    assert planned.after_start() is planned
    assert planned.stored(tmp_path, ()) == planned
    assert planned.dockerfile == WITHOUT_FILES
    assert not planned.builds_after_start
    assert (planned.workdir, planned.user) == ("/app/sub", "app")
    assert planned.env["A"] == "1"
    assert "STAGE" not in planned.env


@pytest.mark.parametrize(
    ("text", "workdir", "user"),
    [
        ("FROM x AS Base\nENV A=1\nWORKDIR /w\nUSER u\nFROM y\nWORKDIR /other\nFROM base\nENV B=$A\n", "/w", "u"),
        ("FROM x\nENV A=1 B=1\nWORKDIR sub\n", None, "root"),
        ("FROM x\nENV A=1 B=1\n", None, "root"),
    ],
)
def test_stage_inherits_from_its_base(tmp_path: Path, text: str, workdir: str | None, user: str) -> None:
    planned = plan(tmp_path, text)
    assert (planned.env, planned.workdir, planned.user) == ({"A": "1", "B": "1"}, workdir, user)


IN_CONTEXT = {"a.txt": "1", "b.txt": "2", "d__one": "3", "d__s__two": "4", "my file": "5"}


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("COPY a.txt /x", ["a.txt"]),
        ("COPY *.txt /x/", ["a.txt", "b.txt"]),
        ("COPY d /x", ["d/one", "d/s/two"]),
        ('COPY ["my file", "/y z"]', ["my file"]),
        ('COPY "my file" /y', ["my file"]),
        ("COPY my\\ file /y", ["my file"]),
        ("COPY --chown=a:b --chmod=755 a.txt /x", ["a.txt"]),
        ("COPY a.txt \\\n\n  # comment\n  b.txt /x/", ["a.txt", "b.txt"]),
        ("COPY inner /x", ["inner"]),
    ],
)
def test_builder_gets_only_copied_files(tmp_path: Path, instruction: str, expected: list[str]) -> None:
    context, staged = tmp_path / "context", tmp_path / "staged"
    task = spec(context, f"FROM x\n{instruction}\n", **IN_CONTEXT)
    if "inner" in instruction:  # a link that is itself a source is followed
        (context / "inner").symlink_to("a.txt")
    planned = plan_image(task)
    assert files_of(planned) == expected
    stored = planned.stored(staged, ())
    assert sorted(str(p.relative_to(staged)) for p in staged.rglob("*") if not p.is_dir()) == expected
    assert stored.dockerfile == planned.dockerfile
    assert not stored.builds_after_start


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("ADD a.txt https://example.org/x /x/", ["a.txt"]),
        ("COPY <<E a.txt /x/\nhello\nE", ["a.txt"]),
        ("COPY << 'E' a.txt /x/\nhello\nE", ["a.txt"]),
        ("RUN --mount=type=bind,source=d,target=/d --mount=type=cache,target=/c make", ["d/one", "d/s/two"]),
    ],
)
def test_files_outside_copy_sources_are_not_staged(tmp_path: Path, instruction: str, expected: list[str]) -> None:
    """A stage that no other one uses makes the SDK send them."""
    text = f"# syntax=docker/dockerfile:1\nARG V=1\nFROM x:$V\n{instruction}\n"
    planned = plan(tmp_path / "context", text, **IN_CONTEXT)
    assert files_of(planned) == expected
    stored = planned.stored(tmp_path / "staged", ())
    assert stored.dockerfile == text.replace("FROM x", "FROM scratch AS ares-exp-context\nCOPY . /\nFROM x")
    assert [path.name for path in sorted((tmp_path / "staged").iterdir())] == [expected[0].partition("/")[0]]


def test_dockerignore_is_respected(tmp_path: Path) -> None:
    files = {"a": "1", "key.pem": "secret", "d__b": "2", "d__key.pem": "secret", ".dockerignore": "**/*.pem\n# c\n"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to("/etc/passwd")
    (tmp_path / ".dockerignore").write_text("")
    task = spec(tmp_path, "FROM x\nCOPY . /x\n", **files)
    with (tmp_path / ".dockerignore").open("a") as ignore:
        ignore.write("empty\nout\n")
    assert files_of(plan_image(task)) == [".dockerignore", "Dockerfile", "a", "d/b"]


@pytest.mark.parametrize("source", ["../secret", "outside", "directory/secret", "*side", "../*"])
@pytest.mark.parametrize("form", ["COPY {} /x/", "ADD {} /x/", "RUN --mount=type=bind,source={},target=/x true"])
def test_sources_outside_the_context_are_rejected(tmp_path: Path, source: str, form: str) -> None:
    (tmp_path / "secret").write_text("secret")
    context = tmp_path / "context"
    context.mkdir()
    (context / "outside").symlink_to(tmp_path / "secret")
    (context / "directory").symlink_to(tmp_path)
    with pytest.raises(TaskError, match=r"leads out of the build context|nothing in"):
        plan(context, f"FROM x\n{form.format(source)}\n")


NOT_FOUND = "which the SDK interprets differently"


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("COPY /a.txt ./b.txt /x/", NOT_FOUND),
        ("ENV D=d\nCOPY $D /x", NOT_FOUND),
        *(("COPY d /x", what) for what in ("link", "empty directory", "device", "not UTF-8")),
    ],
)
def test_files_unsupported_by_the_sdk_upload_after_start(tmp_path: Path, instruction: str, what: str) -> None:
    task, folder = spec(tmp_path, f"FROM x\n{instruction}\n", **IN_CONTEXT), tmp_path / "d"
    if what == "link":
        (folder / "link").symlink_to("one")
    elif what == "empty directory":
        (folder / "empty").mkdir()
    elif what == "device":
        os.mkfifo(folder / "pipe")
    elif what == "not UTF-8":
        (folder / os.fsdecode(b"\xff")).touch()
    planned = plan_image(task)
    assert what in str(planned.local.not_stored)
    assert planned.stored(tmp_path / "staged", ()).builds_after_start
    assert planned.warnings == ()


def test_lines_before_the_first_copy_are_built(tmp_path: Path) -> None:
    text = "FROM a AS one\nRUN <<E\nCOPY no /no\nE\nFROM b\nCOPY --from=one /x /x\n\n# next\nCOPY a /a\nRUN make\n"
    planned = plan(tmp_path, text, a="1").after_start()
    assert planned.dockerfile == text[: text.index("COPY a")]
    assert planned.builds_after_start


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ("FROM debian\n", "a second FROM"),
        ("COPY --from=one /x /y\n", "COPY --from"),
        ("COPY <<E /e\ntrue\nE\n", "here-document"),
        ('ENTRYPOINT ["/x"]\n', "ENTRYPOINT"),
        ("RUN --mount=type=secret,id=k true\n", "RUN --mount=type=secret"),
        ("ENV A=${B%x}\n", "substitution"),
    ],
)
def test_instructions_that_need_the_object_store_are_named(tmp_path: Path, rest: str, named: str) -> None:
    planned = plan(tmp_path, f"FROM x AS one\nCOPY a /a\n{rest}", a="1")
    assert named in planned.warnings[0]
    assert "line 3" in planned.warnings[0]
    assert not planned.stored(tmp_path / "staged", ()).builds_after_start
    assert planned.with_kept_files("s").snapshot == "s"
    with pytest.raises(UnsupportedTaskError, match="without the service's object store") as caught:
        planned.after_start()
    assert named in str(caught.value)


def test_unbuildable_dockerfile_is_rejected_with_both_reasons(tmp_path: Path) -> None:
    task = spec(tmp_path, "FROM x AS one\nCOPY d /d\nFROM y\nCOPY --from=one /d /d\n", d__a="1")
    (tmp_path / "d" / "link").symlink_to("a")
    with pytest.raises(UnsupportedTaskError) as caught:
        plan_image(task)
    for part in (str(tmp_path / "Dockerfile"), "the link d/link", "line 3", "a second FROM", "container=docker"):
        assert part in str(caught.value)


def test_unreadable_build_argument_warns_only_after_copy(tmp_path: Path) -> None:
    text = "FROM x\nARG V=${W%x}\nRUN a $V\n"
    assert plan(tmp_path, text).dockerfile == text
    assert "substitution" in plan(tmp_path, text + "COPY a /a\nRUN b $V\n", a="1").warnings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has neither a docker_image nor a Dockerfile"),
        ("", "no FROM"),
        ("RUN x\n", "no FROM"),
        ("FROM x\nWORDS x\n", "line 2: expected a Dockerfile instruction, got WORDS"),
        ("FROM x\nCOPY missing /x\n", "line 2: nothing in .* matches 'missing'"),
        ("FROM x\nCOPY /etc/passwd /x\n", "nothing in"),  # it is in the context, not on this machine
        ("FROM x\nENV A=1 B\n", "line 2: ENV"),
        (b"FROM x\nENV A=\xff\n", "Cannot read"),
        ("# syntax=someone/else:1\nanything\n", "line 1: the Dockerfile syntax someone/else:1"),
    ],
)
def test_malformed_dockerfile_is_rejected(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    if text is not None:
        (tmp_path / "Dockerfile").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TaskError, match=message):
        plan_image(ContainerSpec(name="t", context_dir=tmp_path))


async def test_failed_command_after_start_names_its_line(tmp_path: Path) -> None:
    planned = plan(tmp_path / "context", "FROM x\nCOPY a /a\nARG TARGETARCH\nRUN fails\n", a="1").after_start()

    async def run(command: str, **options: Any) -> ExecResult:
        if "fails" not in command:
            return ExecResult("A=1\0", 0, 0.0)
        return ExecResult(f"on {options['env']['TARGETARCH']}\n", 1, 0.0)

    async def upload(source: Path, target: str) -> None:
        assert source.name == "a"

    with pytest.raises(ContainerStartError, match=r"line 4: RUN .*: exit code 1(?s:.*)on amd64"):
        await planned.apply(run, upload, workdir="/")


def package(tmp_path: Path) -> Mount:
    folder = tmp_path / "package"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "bin" / "run").chmod(0o755)
    return Mount(folder, "/opt/ares_exp/tool", "sha512:aa==")


def test_local_directories_become_layers_where_supported(tmp_path: Path) -> None:
    tool, linked = package(tmp_path), Mount(tmp_path / "linked", "/opt/ares_exp/linked", "d2")
    linked.source.mkdir()
    (linked.source / "link").symlink_to("nothing")
    mounts = [linked, tool]
    assert plan(tmp_path / "context", "FROM x\n").stored(tmp_path, mounts).layers == (tool,), "links would be lost"
    with_files = plan(tmp_path / "other", "FROM x\nCOPY . /app\n", a="1")
    stored = with_files.stored(tmp_path / "staged", mounts)
    assert stored.layers == (), "the task's own COPY would take it, too"
    assert with_files.after_start().layers == ()
    image = plan_image(ContainerSpec("t", docker_image="debian:12.9"))
    assert image.stored(tmp_path, mounts).layers == ()


@pytest.mark.docker
def test_builder_creates_the_layer(tmp_path: Path) -> None:
    tool, directory = package(tmp_path), tmp_path / "staged"
    directory.mkdir()
    planned = plan(tmp_path / "context", "FROM debian:bookworm-slim\nUSER nobody").stored(directory, [tool])
    params = create_params(ContainerSpec("t"), DaytonaOptions(), planned, labels={}, ttl_min=1, directory=directory)
    shutil.copytree(tool.source, directory / str(tool.source).lstrip("/"))  # as the store holds it
    (tmp_path / "Dockerfile").write_text(params.image.dockerfile())  # type: ignore[union-attr]
    build = ["docker", "build", "-q", "-f", tmp_path / "Dockerfile", directory]
    image = subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip()
    try:
        show = "/opt/ares_exp/tool/bin/run; stat -c %u /opt/ares_exp/tool/bin/run; touch /opt/ares_exp/tool/x"
        ran = subprocess.run(["docker", "run", "--rm", image, "sh", "-c", show], capture_output=True, text=True)
        assert ran.stdout == "ran\n0\n"
        assert "Permission denied" in ran.stderr
    finally:
        subprocess.run(["docker", "rmi", "-f", image], check=True, capture_output=True)


async def test_cancelled_start_leaves_no_context_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    planned = plan(
        tmp_path / "context", "FROM x\nCOPY a /a\nRUN hang\n", a="1", **{".dockerignore": "b\n"}
    ).after_start()
    hangs = asyncio.Event()

    async def run(command: str, **_: object) -> ExecResult:
        if "hang" in command:
            assert [copy for one in copies.iterdir() for copy in one.iterdir()]
            hangs.set()
            await asyncio.Event().wait()
        return ExecResult("A=1\0", 0, 0.0)

    async def upload(source: Path, target: str) -> None:
        assert source.is_relative_to(copies)

    task = asyncio.create_task(planned.apply(run, upload, workdir="/"))
    async with asyncio.timeout(20):
        await hangs.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert list(copies.iterdir()) == []
