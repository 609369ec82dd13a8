"""What a Dockerfile is read as, and what is refused by name."""

from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.images.dockerfile_steps import (
    Base,
    CopyStep,
    Dockerfile,
    MakeDirectoryStep,
    RunStep,
    check_sources,
    find_sources,
    read_dockerfile,
    stage_context,
)
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import TaskError, UnsupportedTaskError


def read(directory: Path, text: str, base: Base | None = None) -> Dockerfile:
    (directory / "Dockerfile").write_text(text)
    return read_dockerfile(directory / "Dockerfile", base or Base({"PATH": "/bin"}), refusal="no {} here")


def test_all_supported_instructions_are_read(tmp_path: Path) -> None:
    dockerfile = read(
        tmp_path,
        """\
# syntax=docker/dockerfile:1
ARG TAG=slim
FROM --platform=linux/amd64 debian:${TAG} AS only
LABEL a=b
ARG VERSION=1.5
ENV A=1 B="two words" \\
    C=$VERSION
ENV LEGACY some value
ENV PATH=/opt/x/bin:$PATH
WORKDIR /app
WORKDIR sub
COPY --chmod=755 --chown=root:root a.txt b.txt /data/
ADD . .
RUN apt-get update && \\

    # a comment in the middle
    apt-get install
SHELL ["/bin/bash", "-ec"]
RUN --mount=type=cache,target=/c echo $A
RUN ["exec", "form"]
USER nobody
RUN id
VOLUME /v /w
EXPOSE 80
HEALTHCHECK NONE
CMD ["sh"]
""",
    )
    env = {"PATH": "/opt/x/bin:/bin", "A": "1", "B": "two words", "C": "1.5", "LEGACY": "some value"}
    built = {**env, "VERSION": "1.5"}
    assert dockerfile.base == "debian:slim"
    assert dockerfile.env == env
    assert (dockerfile.workdir, dockerfile.user) == ("/app/sub", "nobody")
    steps = [
        MakeDirectoryStep(10, "/app"),
        MakeDirectoryStep(11, "/app/sub"),
        CopyStep(12, ("a.txt", "b.txt"), "/data/", "755", "root:root"),
        CopyStep(13, (".",), "/app/sub/./", None, None),
        RunStep(14, ("/bin/sh", "-c", "apt-get update &&     apt-get install"), built, "/app/sub", "root"),
        RunStep(19, ("/bin/bash", "-ec", "echo $A"), built, "/app/sub", "root"),
        RunStep(20, ("exec", "form"), built, "/app/sub", "root"),
        RunStep(22, ("/bin/bash", "-ec", "id"), built, "/app/sub", "nobody"),
        MakeDirectoryStep(23, "/v"),
        MakeDirectoryStep(23, "/w"),
    ]
    assert list(dockerfile.steps) == steps


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("$A", "1"),
        ("${A}x", "1x"),
        ("$A$B", "1"),
        ("${B:-default}", "default"),
        ("${A:-default}", "1"),
        ("${A:+other}", "other"),
        ("${B:+other}", ""),
        ("x${A:+:$A}", "x:1"),
        ("x${B:+:$B}", "x"),
        ("${B:-$A/b}", "1/b"),
        ("'$A'", "$A"),
        ('"$A b"', "1 b"),
        (r"\$A", "$A"),
        ("a=b", "a=b"),
    ],
)
def test_variables_are_substituted(tmp_path: Path, value: str, expected: str) -> None:
    assert read(tmp_path, f"FROM x\nENV A=1\nENV R={value}\n").env["R"] == expected


def test_env_wins_over_arg_and_earlier_values_count(tmp_path: Path) -> None:
    dockerfile = read(tmp_path, "FROM x\nARG A=arg\nENV A=env\nENV A=new B=$A\nRUN x\n")
    assert dockerfile.env == {"PATH": "/bin", "A": "new", "B": "env"}
    assert isinstance(dockerfile.steps[0], RunStep)
    assert dockerfile.steps[0].env["A"] == "new"


def test_arg_before_from_must_be_declared_again(tmp_path: Path) -> None:
    text = "ARG T=1\nFROM x:$T\nENV V=${T:-unset}\n{}ENV W=${T:-unset}\n"
    assert read(tmp_path, text.replace("{}", "")).env == {"PATH": "/bin", "V": "unset", "W": "unset"}
    assert read(tmp_path, text.replace("{}", "ARG T\n")).env["W"] == "1"
    assert read(tmp_path, text.replace("{}", "ARG T=2\n")).env["W"] == "2"


def test_already_built_lines_create_no_steps(tmp_path: Path) -> None:
    text = "FROM a AS b\nENV A=1\nWORKDIR /w\nCOPY <<E /e\nE\nFROM c\nUSER u\n"
    text += "FROM b\nARG V=2\nWORKDIR s\nENV B=${A%x}\nRUN x $V\n"
    built = Base(workdir="", built_lines=len(text.splitlines()) - 1)
    dockerfile = read(tmp_path, text, built)
    assert dockerfile.steps == (RunStep(12, ("/bin/sh", "-c", "x $V"), {"A": "1", "V": "2"}, "/w/s", "root"),)
    told = read(tmp_path, text, Base({"A": "box", "B": "box"}, "/box", built_lines=built.built_lines))
    assert told.steps == (RunStep(12, ("/bin/sh", "-c", "x $V"), {"A": "box", "B": "box", "V": "2"}, "/box", "root"),)


BODY = "FROM\n\tRUN $x 'y'\n"


@pytest.mark.parametrize(
    ("opening", "ending", "command"),
    [
        ("RUN cat <<EOF >/x", "EOF", f"cat <<EOF >/x\n{BODY}EOF"),
        ("RUN cat > /x << 'EOF'", "EOF", f"cat > /x << 'EOF'\n{BODY}EOF"),
        ('RUN a && \\\n  cat <<- "E F" > /x', "\tE F", f'a &&   cat <<- "E F" > /x\n{BODY}E F'),
        ("RUN 3<<  -EOF cat", "-EOF", f"3<<  -EOF cat\n{BODY}-EOF"),
        ("RUN << EOF", "EOF", BODY),
        ("RUN <<-EOF", "\t\tEOF", BODY.replace("\t", "")),
        ("RUN --mount=type=cache,target=/c <<eo'f' # one", "eof", f"<<eo'f' # one\n{BODY}eof"),
    ],
)
def test_here_documents_are_read_like_buildkit(tmp_path: Path, opening: str, ending: str, command: str) -> None:
    dockerfile = read(tmp_path, f"FROM x\n{opening}\n{BODY}{ending}\nWORKDIR /after\n")
    run, workdir = dockerfile.steps
    assert isinstance(run, RunStep)
    assert run.argv == ("/bin/sh", "-c", command)
    assert workdir == MakeDirectoryStep(2 + opening.count("\n") + 4, "/after")


def test_several_here_documents_are_read(tmp_path: Path) -> None:
    dockerfile = read(tmp_path, "FROM x\nRUN cat << A /dev/fd/3 3<< B\nB\nA\nA\nB\nRUN two\n")
    assert [step.argv[-1] for step in dockerfile.steps if isinstance(step, RunStep)] == [
        "cat << A /dev/fd/3 3<< B\nB\nA\nA\nB",
        "two",
    ]


@pytest.mark.parametrize(
    "command", ["echo '<< A'", 'echo "<< A"', "echo $(( 1 << A ))", "cat <<< A", "echo \\<< A", "x<<A", "echo <<"]
)
def test_commands_without_here_documents_are_unchanged(tmp_path: Path, command: str) -> None:
    dockerfile = read(tmp_path, f"FROM x\nRUN {command}\nRUN two\n")
    assert [step.argv[-1] for step in dockerfile.steps if isinstance(step, RunStep)] == [command, "two"]


@pytest.mark.parametrize(
    ("instruction", "named"),
    [
        ('ENTRYPOINT ["/start"]', "ENTRYPOINT"),
        ("HEALTHCHECK CMD true", "HEALTHCHECK"),
        ("ONBUILD RUN x", "ONBUILD"),
        ("FROM other", "second FROM"),
        ("COPY --from=builder /a /b", "COPY --from"),
        ("COPY --parents a /b", "COPY --parents"),
        ("COPY <<EOF /x\nhello\nEOF", "here-document"),
        ("COPY << 'EOF' /x\nhello\nEOF", "here-document"),
        ("RUN --mount=type=secret,id=k true", "RUN --mount"),
        ("RUN --network=none true", "RUN --network"),
        ("ADD https://example.org/x /x", "https://example.org/x"),
        ("ADD git@example.org:a/b.git /x", "git@example"),
        ("ADD layers.tar.gz /x", "archive"),
        ("ENV A=${B%suffix}", "substitution"),
        ("ENV A=${B:-${C}}", "substitution"),
        ("ENV a.b=1", "a.b"),
        ("WORDS x", "WORDS"),
    ],
)
def test_unsupported_instructions_are_refused_by_name(tmp_path: Path, instruction: str, named: str) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM x\n{instruction}\n")
    with pytest.raises(UnsupportedTaskError) as caught:
        LocalContainerFactory().check(ContainerSpec(name="t", context_dir=tmp_path))
    for part in (named, "line 2", str(tmp_path / "Dockerfile"), "container=docker"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM"),
        ("RUN x\n", "before FROM"),
        ("FROM x\nRUN\n", "line 2: RUN needs"),
        ("FROM x\n\n# c\nWORKDIR   \n", "line 4"),
        ("FROM x\nENV A=1 B\n", "line 2: ENV"),
        ("FROM x\nCOPY one\n", "a source and a target"),
        ("FROM x\nRUN cat << 'EOF'\nEOF \n", "line 2: expected a line `EOF`"),
        ("FROM x\nSHELL /bin/bash\n", "SHELL needs a list"),
        ("FROM x\nCOPY missing /x\n", "'missing'"),
        ("FROM x\nCOPY *.none /x/\n", "none"),
        ("FROM x\nCOPY a b /x\n", "ends with '/'"),
        ("FROM x\nCOPY ../secret /x\n", "leads out"),
        ("FROM x\nCOPY outside /x\n", "leads out"),
    ],
)
def test_malformed_instructions_are_refused(tmp_path: Path, text: str, message: str) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (tmp_path / "secret").write_text("secret")
    (context / "outside").symlink_to(tmp_path / "secret")
    for name in ("a", "b"):
        (context / name).write_text(name)
    (context / "Dockerfile").write_text(text)
    with pytest.raises(TaskError, match=message):
        LocalContainerFactory().check(ContainerSpec(name="t", context_dir=context))


def test_dockerfile_with_invalid_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_bytes(b"FROM x\nENV A=\xff\n")
    with pytest.raises(TaskError, match="Dockerfile"):
        LocalContainerFactory().check(ContainerSpec(name="t", context_dir=tmp_path))


def test_copy_sources_are_matched(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "my file"):
        (tmp_path / name).write_text(name)
    dockerfile = read(tmp_path, 'FROM x\nCOPY *.txt /x/\nCOPY ["my file", "/y z"]\nCOPY / /all\n')
    check_sources(dockerfile, tmp_path)
    first, second, third = (find_sources(step, tmp_path) for step in dockerfile.steps if isinstance(step, CopyStep))
    assert [path.name for path in first] == ["a.txt", "b.txt"]
    assert second == [tmp_path / "my file"]
    assert third == [tmp_path]


def test_dockerignore_excludes_sources(tmp_path: Path) -> None:
    context = tmp_path / "context"
    (context / "cache").mkdir(parents=True)
    for name in ("keep.txt", "drop.log", "cache/x", "cache/keep"):
        (context / name).write_text(name)
    (context / "link").symlink_to("keep.txt")
    assert stage_context(context, tmp_path / "unused") == context
    (context / ".dockerignore").write_text("# comment\n*.log\n\ncache/*\n!cache/keep\n")
    staged = stage_context(context, tmp_path / "staged")
    files = {str(path.relative_to(staged)) for path in staged.rglob("*") if not path.is_dir()}
    assert files == {".dockerignore", "cache/keep", "keep.txt", "link"}
    assert (staged / "link").is_symlink()
