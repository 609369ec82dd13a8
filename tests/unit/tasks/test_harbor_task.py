"""Harbor tasks: loading, and prior context."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.containers.network_policy import NO_NETWORK
from ares_exp.errors import TaskError, UnsupportedTaskError
from ares_exp.llms.request import freeze
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.task_files import read_prior_context
from ares_exp.tasks.task_set import SAMPLES, TaskFolder, load_task_set
from tests.examples import examples
from tests.unit.trajectories.strategies import json_values

MakeTask = Callable[..., Path]
Files = Mapping[str, str | None]

STEP = "[[steps]]\nname = 'a'"
CONVERSATION = '{"agent": {"name": "a", "version": "1"}, "steps": [{"step_id": 1, "source": "user", "message": "Hi."}]}'


def test_linked_task_is_listed_once_by_its_name(make_task: MakeTask) -> None:
    folder = make_task("zebra").parent
    (folder / "alias").symlink_to("zebra")
    tasks, skipped = load_task_set(folder)
    assert [task.name for task in tasks] == ["zebra"]
    assert "already has the name 'zebra'" in skipped["zebra"]


def test_path_is_a_task_or_directory_of_tasks(make_task: MakeTask, tmp_path: Path) -> None:
    root = make_task("one")
    assert [task.path for task in load_task_set(root)[0]] == [root]
    assert [task.path for task in load_task_set(str(root.parent))[0]] == [root]
    with pytest.raises(TaskError, match=r"no such directory.*env\.path"):
        load_task_set(tmp_path / "nowhere")
    with pytest.raises(TaskError, match=r"no valid task.*no sub-directories"):
        TaskFolder(root / "tests").load(list, print, reward_key=None)
    make_task("bad/inner", "[agent")
    with pytest.raises(TaskError, match=r"no valid task \(inner: .*TOML"):
        TaskFolder(root.parent / "bad").load(list, print, reward_key=None)
    (root / "instruction.md").unlink()
    with pytest.raises(TaskError, match=r"instruction\.md"):
        load_task_set(root)


WINDOWS = {"tests/test.bat": ""}
REFUSED: list[tuple[str, Files, str]] = [
    ("[verifier.environment]\nos = 'windows'", {}, 'operating system "windows" ([verifier.environment].os)'),
    (f"{STEP}\nverifier.environment.tpu = {{type = 'a', topology = '1x1'}}", {"steps/a/instruction.md": ""},
     "TPUs ([steps[0].verifier.environment].tpu)"),
]  # fmt: skip


@pytest.mark.parametrize(("toml", "files", "feature"), REFUSED, ids=[case[2] for case in REFUSED])
def test_unsupported_features_load_but_do_not_run(make_task: MakeTask, toml: str, files: Files, feature: str) -> None:
    task = load_task(make_task(toml=toml, files=files))
    with pytest.raises(UnsupportedTaskError) as caught:
        task.check_runnable()
    assert f"'a-task' uses unsupported features: {feature}. " in str(caught.value)
    assert "env.exclude=[a-task]" in str(caught.value)


def test_all_unsupported_features_are_named_together(make_task: MakeTask) -> None:
    toml = "[environment]\nos = 'Windows'\ntpu = {type = 'a', topology = '2x2'}"
    task = load_task(make_task(toml=toml, files=WINDOWS))
    with pytest.raises(UnsupportedTaskError, match=r'system "windows" .*, TPUs'):
        task.check_runnable()


@pytest.mark.parametrize(
    ("toml", "files", "need"),
    [
        ("[[environment.mcp_servers]]\nname = 'a'\nurl = 'b'", {}, "mcp_servers"),
        ("[environment]\nskills_dir = '/skills'", {}, "skills_dir"),
        ("", {"trajectory.json": CONVERSATION}, "messages"),
    ],
)
def test_context_unsupported_by_the_agent_is_refused(make_task: MakeTask, toml: str, files: Files, need: str) -> None:
    task = load_task(make_task(toml=toml, files=files))
    task.check_runnable(supported=frozenset({need}))
    task.check_runnable(supported=None)
    with pytest.raises(UnsupportedTaskError, match=rf"needs features that this agent does not support: {need}"):
        task.check_runnable(supported=frozenset({"messages", "skills_dir", "mcp_servers"} - {need}))


@pytest.mark.parametrize(
    "toml",
    [
        "[[verifier.collect]]\ncommand = 'a'\nservice = 'db'",
        f"{STEP}\nartifacts = [{{source = '/a', service = 'db'}}]",
    ],
)
def test_services_need_a_compose_file(make_task: MakeTask, toml: str) -> None:
    files = {"steps/a/instruction.md": ""}
    with pytest.raises(TaskError, match=r"name the services db, but no environment/docker-compose\.yaml"):
        load_task(make_task(toml=toml, files=files)).check_runnable()
    task = load_task(make_task("composed", toml, {**files, "environment/docker-compose.yaml": "services: {db: {}}"}))
    task.check_runnable()


def test_container_spec_includes_users_of_hooks(make_task: MakeTask) -> None:
    toml = "[[verifier.collect]]\ncommand = 'a'\nuser = 'nobody'\n[[verifier.collect]]\ncommand = 'b'"
    assert load_task(make_task(toml=toml)).container_spec.users == {"nobody"}


def test_solution_links_must_point_inside_the_task(make_task: MakeTask, tmp_path: Path) -> None:
    root = make_task(files={"solution/data/x": ""})
    (root / "solution" / "outside").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskError, match="solution/outside: expected a link to a place inside the task"):
        load_task(root)


def test_warnings_name_the_task(make_task: MakeTask) -> None:
    task = load_task(make_task(toml="colour = 1", files={"instruction.md": "# canary\n \n"}))
    assert task.warnings == ("a-task: task.toml: unknown key colour is ignored", "a-task: instruction.md is empty")


def test_description_contains_the_metadata(make_task: MakeTask) -> None:
    task = load_task(make_task(toml="[task]\nname = 'org/name'\nversion = '2'\n[metadata]\nday = 2026-01-02"))
    assert task.describe() == {
        "format": "harbor",
        "name": "a-task",
        "path": str(task.path),
        "digest": task.digest,
        "reward_key": None,
        "package": "org/name",
        "package_version": "2",
        "origin": None,
        "extra_instructions": [],
        "metadata": {"day": "2026-01-02"},
    }


def test_samples_are_valid_without_warnings() -> None:
    tasks, skipped = load_task_set(SAMPLES)
    assert len(tasks) >= 6
    assert skipped == {}
    for task in tasks:
        task.check_runnable(needs_solution=True)
        package = task.config.task
        assert package.name == f"ares-exp/{task.name}"
        assert {"difficulty", "category"} <= task.config.metadata.keys()
        assert (task.warnings, task.container_spec.network) == ((), NO_NETWORK)


USER = {"source": "user", "message": "Count the lines."}
CALL = {
    "source": "agent",
    "message": "Counting.",
    "tool_calls": [{"tool_call_id": "t1", "function_name": "sh", "arguments": {"cmd": "wc -l x"}}],
    "observation": {"results": [{"source_call_id": "t1", "content": "42 x"}]},
}
RESPONSE = {"source": "agent", "message": "There are 42."}
TOLD = [
    {"role": "user", "content": "Count the lines."},
    {
        "role": "assistant",
        "content": "Counting.",
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "sh", "arguments": '{"cmd": "wc -l x"}'}}],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "42 x"},
]
SYSTEM = {"source": "system", "message": "You operate a shell."}
REPLACED = {
    "source": "system",
    "message": "Rewritten.",
    "observation": {"results": [{"content": "So far."}]},
    "extra": {"context_management": {"type": "rewrite", "boundary": "replace"}},
}
PARTS = [{"type": "text", "text": "See"}, {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}]
AUDIO = [{"type": "audio", "source": {"media_type": "audio/wav", "path": "a.wav"}}]


def document(*steps: dict[str, Any]) -> str:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    return json.dumps({"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": numbered})


@pytest.mark.parametrize(
    ("steps", "messages"),
    [
        ([USER], TOLD[:1]),
        ([SYSTEM, USER, CALL], TOLD),
        ([SYSTEM, USER, CALL, RESPONSE], [*TOLD, {"role": "assistant", "content": "There are 42."}]),
        ([USER, RESPONSE, USER], [TOLD[0], {"role": "assistant", "content": "There are 42."}, TOLD[0]]),
        ([USER, {**CALL, "is_copied_context": True}], TOLD),
        ([USER, {**CALL, "llm_call_count": 0}], TOLD),
        ([USER, SYSTEM], [TOLD[0], {"role": "system", "content": "You operate a shell."}]),
        ([SYSTEM, USER, RESPONSE, REPLACED, USER], [{"role": "user", "content": "So far."}, TOLD[0]]),
        (
            [{**USER, "message": PARTS}, {**RESPONSE, "message": PARTS}, {**USER, "message": AUDIO}],
            [
                {"role": "user", "content": [PARTS[0], {"type": "image_url", "image_url": {"url": "a.png"}}]},
                {"role": "assistant", "content": "See"},
                {"role": "user", "content": [{"type": "text", "text": "[audio: a.wav]"}]},
            ],
        ),
    ],
)
def test_complete_conversation_is_read(tmp_path: Path, steps: list[dict[str, Any]], messages: list[Any]) -> None:
    (tmp_path / "trajectory.json").write_text(document(*steps))
    assert read_prior_context(tmp_path / "trajectory.json") == freeze(messages)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n"agent": 7,\n,}', r"line 3 column 1"),
        (document(), r"steps.*at least 1"),
        (document({"source": "user"}), r"steps\.0\.message"),
        ("[]", "valid ATIF document"),
        ("", "line 1 column 1"),
        ('{"agent": ' * 100_000, "nested too deeply"),
        (document(SYSTEM), "at least one message"),
    ],
)
def test_invalid_conversations_are_found_before_the_start(make_task: MakeTask, text: str, said: str) -> None:
    task = load_task(make_task(files={"trajectory.json": text}))
    task.check_runnable()
    with pytest.raises(TaskError, match=rf"a-task/trajectory\.json: .*{said}"):
        task.check_runnable(supported=frozenset({"messages"}))


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_conversation_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    replaced = json.loads(document(SYSTEM, USER, CALL, {**RESPONSE, "message": PARTS}))
    inner: Any = replaced
    while True:
        key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
        if not isinstance(inner[key], dict | list) or not inner[key] or data.draw(st.integers(0, 4)) == 0:
            break
        inner = inner[key]
    inner[key] = data.draw(json_values)
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(replaced))
    with contextlib.suppress(TaskError):  # any other error is a defect
        read_prior_context(path)
