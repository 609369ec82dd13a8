"""`resume=`, `replay=` and `branch_from=`: recorded options, and typed options that override them."""

import functools
import grp
import json
import os
import pwd
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ares_exp.config.hydra_setup import compose_config, set_up_hydra, store_recorded_config
from ares_exp.config.options import ROOT_CONFIG, conf_dir
from ares_exp.errors import ConfigError
from ares_exp.runs.resume.compose_from_run import compose_from_run
from ares_exp.runs.resume.recorded_run import is_trusted
from ares_exp.trajectories.files.episode_file import dump_episode
from tests.unit.trajectories.chats import chat, write

Recorded = Callable[..., Path]


def resolved(config: Any, run_dir: str) -> dict[str, Any]:
    OmegaConf.register_new_resolver("hydra", lambda _: run_dir, replace=True)
    try:
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    finally:
        OmegaConf.clear_resolver("hydra")


@functools.cache  # most tests record the same
def composed_here(*overrides: str) -> DictConfig:
    return compose_config(overrides, config_dirs=[])


def record(run: Path, overrides: Sequence[str], *, cwd: Path, config_dir: str = "") -> None:
    """Writes in a run directory how its run was composed."""
    config = compose_config(overrides, config_dirs=[Path(config_dir)]) if config_dir else composed_here(*overrides)
    (run / ".hydra").mkdir(parents=True, exist_ok=True)
    (run / "episodes.jsonl").touch()
    (run / "config.yaml").write_text(yaml.safe_dump(resolved(config, str(run))))
    (run / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(config))
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    sources = [{"path": config_dir, "schema": "file", "provider": "command-line"}] if config_dir else []
    runtime = {"cwd": str(cwd), "config_sources": sources, "choices": {"agent": "shell", "hydra/output": "default"}}
    (run / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": runtime}}))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Makes a run directory `first` with these overrides, one episode of each task, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def make(*overrides: str, tasks: Sequence[str] = ("fix",), cwd: Path = tmp_path, config_dir: str = "") -> Path:
        run = tmp_path / "first"
        record(run, overrides, cwd=cwd, config_dir=config_dir)
        for number, task in enumerate(tasks):
            write(run / "trajectories" / f"e{number}.json", chat(f"e{number}", task))
        return run

    return make


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes the folder of a sweep `first` with these overrides, of Hydra's keys and of others, started `there`."""
    monkeypatch.chdir(tmp_path)

    def make(*overrides: str, of_hydra: Sequence[str] = (), there: str = "") -> Path:
        folder = tmp_path / "first"
        folder.mkdir()
        runtime = {"cwd": str(tmp_path / there), "config_sources": []}
        hydra = {"overrides": {"hydra": of_hydra, "task": overrides}, "runtime": runtime}
        (folder / "multirun.yaml").write_text(json.dumps({"hydra": hydra}))
        return folder

    return make


def composed(*overrides: str) -> dict[str, Any]:
    set_up_hydra()
    command, root = compose_from_run([], overrides), ROOT_CONFIG
    if command.values is not None:
        root = store_recorded_config(command.values, command.choices)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolved(compose(root, overrides=command.argv), "out")


def rewrite(path: str, old: str, new: str) -> None:
    """Changes a record, as another user might."""
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def test_other_command_lines_are_unchanged() -> None:
    assert compose_from_run(["-m"], ["seed=1,2", "name=replay=x"]) == (
        ["-m", "seed=1,2", "name=replay=x"],
        None,
        None,
        {},
    )
    for plain in (["replay=null"], ["resume=true", "seed=1,2"], ["resume=false"]):
        assert compose_from_run([], plain).argv == plain


def test_replay_of_one_episode_selects_its_task(recorded: Recorded) -> None:
    run = recorded("seed=5", "attempts=4", "env.limit=1", "policy=scripted", "policy.replies=[a]", tasks=["fix", "sum"])
    config = composed("replay=first/e1")
    assert compose_from_run([], ["replay=first/e1"]).source == Path(run.name)
    assert config["policy"]["trajectory"] == "first"
    assert (config["policy"]["episode"], config["policy"]["strict"]) == ("e1", False)
    assert (config["env"]["tasks"], config["env"]["limit"]) == (["sum"], None)
    assert (config["seed"], config["attempts"], config["replay"]) == (5, 1, "first/e1")
    assert "replies" not in config["policy"]


def test_replay_of_a_run_includes_every_attempt(recorded: Recorded) -> None:
    recorded("env.exclude=[x]", tasks=["fix", "sum", "fix"])
    config = composed("replay=first")
    assert (config["env"]["tasks"], config["env"]["exclude"], config["attempts"]) == (["fix", "sum"], [], 2)
    assert config["policy"]["episode"] is None
    assert composed("replay=first", "attempts=5", "policy.strict=true")["attempts"] == 5
    assert composed("replay=first", "policy.strict=true")["policy"]["strict"] is True


@pytest.mark.parametrize(
    ("typed", "oracle"),
    [
        ("policy@env.oracle=scripted env.oracle.replies=[no]", {"replies": ["no"], "repeat_last": False}),
        ("env.oracle.repeat_last=true", {"replies": ["yes"], "repeat_last": True}),
        ("env=harbor", None),
    ],
)
def test_option_in_another_package_is_kept(recorded: Recorded, typed: str, oracle: object) -> None:
    recorded("env=twenty_questions", "policy@env.oracle=scripted", "env.oracle.replies=[yes]", "policy=oracle")
    config = composed("replay=first", *typed.split())
    found = config["env"].get("oracle")
    assert (found and {key: found[key] for key in ("replies", "repeat_last")}) == oracle
    assert config["policy"]["trajectory"] == "first"


def test_branch_has_the_options_of_its_run(recorded: Recorded) -> None:
    recorded("policy=openai", "policy.model=m", "policy.temperature=0", "env.tasks=[1,2]", "attempts=7")
    config = composed("branch_from=first/fix@2", "branches=8", "policy.temperature=1.0", "branch.response='a b'")
    assert (config["branch_from"], config["branches"], config["attempts"]) == ("first/e0@2", 8, 8)
    assert (config["policy"]["model"], config["policy"]["temperature"]) == ("m", 1.0)
    assert (config["env"]["tasks"], config["branch"]["response"]) == (["fix"], "a b")


@pytest.mark.parametrize(
    ("before", "typed", "expected"),
    [
        (
            "policy=openai policy.model=m",
            "policy=oracle",
            {"_target_": "ares_exp.policies.oracle.OraclePolicy"},
        ),
        ("policy=scripted policy.replies=[a] ++policy.repeat_last=true", "policy.repeat_last=false", False),
        ("policy=scripted policy.replies=[a]", "policy.replies=[b,c]", ["b", "c"]),
    ],
)
def test_typed_options_override_recorded_options(recorded: Recorded, before: str, typed: str, expected: object) -> None:
    recorded(*before.split())
    policy = composed("branch_from=first/fix@1", typed)["policy"]
    assert policy == expected if isinstance(expected, dict) else expected in policy.values()


def test_added_key_can_be_changed_and_removed(recorded: Recorded) -> None:
    recorded("policy=openai", "policy.model=m", "+policy.extra_body.top_k=5", "++policy.extra_body.x=1")
    again = ("branch_from=first/fix@1",)
    assert composed(*again)["policy"]["extra_body"] == {"top_k": 5, "x": 1}
    assert composed(*again, "policy.extra_body.top_k=6")["policy"]["extra_body"] == {"top_k": 6, "x": 1}
    assert composed(*again, "+policy.extra_body.top_k=6")["policy"]["extra_body"] == {"top_k": 6, "x": 1}
    assert composed(*again, "~policy.extra_body.top_k")["policy"]["extra_body"] == {"x": 1}
    assert composed(*again, "policy.extra_body={y:2}")["policy"]["extra_body"] == {"y": 2}
    assert composed(*again, "policy.extra_body=null")["policy"]["extra_body"] is None


def test_typed_choices_make_a_sweep(recorded: Recorded) -> None:
    recorded("seed=1")
    derived = compose_from_run(["-m"], ["branch_from=first/fix@1", "seed=2,3", "branches=1,2"])
    assert derived.argv[0] == "-m"
    assert derived.argv[-2:] == ["seed=2,3", "branches=1,2"]
    assert "seed=1" not in derived.argv


def test_hostile_task_names_are_literal(recorded: Recorded) -> None:
    task = 'a "b", ${oc.env:HOME}] \\'
    recorded(tasks=[task, "*"])
    assert composed("replay=first")["env"]["tasks"] == [task, "*"]


def test_recorded_paths_are_made_absolute(recorded: Recorded, tmp_path: Path) -> None:
    there = tmp_path / "there"
    recorded(
        "env.path='my tasks'",
        "env.extra_instruction_paths=[a.md,/abs/b.md]",
        "agent.templates_dir=/abs",
        "name=there",
        "policy=scripted",
        "policy.replies=[a]",
        cwd=there,
    )
    config = composed("branch_from=first/fix@1")
    assert config["env"]["path"] == str(there / "my tasks")
    assert config["env"]["extra_instruction_paths"] == [str(there / "a.md"), "/abs/b.md"]
    assert (config["agent"]["templates_dir"], config["name"]) == ("/abs", "there")
    assert composed("branch_from=first/fix@1", "env.path=here")["env"]["path"] == "here"


def test_folders_of_options_are_taken_over(recorded: Recorded, tmp_path: Path) -> None:
    options = tmp_path / "my options"
    (options / "policy").mkdir(parents=True)
    (options / "policy" / "mine.yaml").write_text("# mine\n_target_: ares_exp.policies.oracle.OraclePolicy\n")
    recorded("policy=mine", config_dir=str(options))
    assert f'hydra.searchpath=["options://{options}"]' in compose_from_run([], ["branch_from=first/fix@1"]).argv
    (options / "policy" / "mine.yaml").rename(tmp_path / "mine.yaml")
    (options / "policy").rmdir()
    options.rmdir()
    with pytest.raises(ConfigError, match="which is missing now"):
        compose_from_run([], ["branch_from=first/fix@1"])


def test_config_folders_inside_a_run_are_rejected(recorded: Recorded, tmp_path: Path) -> None:
    run = recorded()
    (tmp_path / "x").mkdir()
    for folder in (tmp_path / "x" / ".." / "first" / ".hydra", "first/.hydra", "x"):
        source = {"path": str(folder), "schema": "file", "provider": "command-line"}
        record = {"hydra": {"runtime": {"cwd": str(tmp_path), "config_sources": [source]}}}
        (run / ".hydra" / "hydra.yaml").write_text(json.dumps(record))
        with pytest.raises(ConfigError, match="outside of this run directory"):
            compose_from_run([], ["replay=first"])


def test_masked_secrets_must_be_given_again(recorded: Recorded) -> None:
    recorded("policy=openai", "policy.model=m", "+policy.extra_body.api_token='***'", "+tracker.key='***'")
    with pytest.raises(ConfigError) as caught:
        compose_from_run([], ["branch_from=first/fix@1"])
    assert "policy.extra_body.api_token=… tracker.key=…" in str(caught.value)
    with pytest.raises(ConfigError, match=r"tracker\.key=…"):
        compose_from_run([], ["replay=first"])
    again = ["branch_from=first/fix@1", "~tracker.key", "policy.extra_body.api_token=mine"]
    config = composed(*again)
    assert config["policy"]["extra_body"] == {"api_token": "mine"}
    assert "key" not in config["tracker"]


@pytest.mark.parametrize(
    "line",
    [
        "+tracker._target_=os.system",
        pytest.param("++tracker={_target_: os.system}", marks=pytest.mark.nightly),
        "+env.a={_target_: os.system}",
    ],
)
def test_unlisted_class_in_a_record_is_rejected(recorded: Recorded, line: str) -> None:
    run = recorded(line)
    assert "os.system" in str(composed("replay=first")), "it is the user's own run"
    run.chmod(0o777)
    with pytest.raises(ConfigError, match=r"names a class that is not part of an available option.*_target_=os.system"):
        compose_from_run([], ["replay=first", "resume_force=true"])
    key = line.lstrip("+").partition("=")[0]
    value = "mine.Tracker" if key.endswith("_target_") else "{_target_: mine.Tracker}"
    again = composed("replay=first", "resume_force=true", f"++{key}={value}")
    assert "mine.Tracker" in str(again), "typed again, it is the user's own"


def test_class_of_a_custom_option_is_kept(recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "options" / "policy").mkdir(parents=True)
    (tmp_path / "options" / "policy" / "mine.yaml").write_text(
        "# mine\nsub: {_target_: mine.Part}\n_target_: 'mine.Policy'\n"
    )
    recorded("policy=mine", config_dir=str(tmp_path / "options")).chmod(0o777)
    assert composed("branch_from=first/fix@1", "resume_force=true")["policy"] == {
        "_target_": "mine.Policy",
        "sub": {"_target_": "mine.Part"},
    }


def test_recorded_interpolations_are_text(recorded: Recorded) -> None:
    recorded("env.exclude=[plain]")
    names = ["${oc.env:HOME}", "a ${ oc.env:HOME}", "${oc.decode:1}", "${agent._target_", "\\${x:y}", "\\\\${x}"]
    rewrite("first/config.yaml", "exclude:\n  - plain", f"exclude: {json.dumps(names)}")
    assert composed("resume=first")["env"]["exclude"] == names


def test_recorded_references_to_this_machine_are_not_resolved(recorded: Recorded) -> None:
    recorded("env.exclude=[a,b,c,d,e]")
    names = ["${oc.env:HOME}", "${now:%Y}", "x${hydra:job.num}", "${oc.select:a.b}", "${a.${oc.env:HOME}}"]
    rewrite("first/.hydra/config.yaml", "exclude:\n  - a\n  - b\n  - c\n  - d\n  - e", f"exclude: {json.dumps(names)}")
    assert composed("resume=first")["env"]["exclude"] == ["a", "b", "c", "d", "e"]


def test_record_cannot_configure_hydra(recorded: Recorded) -> None:
    recorded()
    text = "hydra: {callbacks: {theirs: {_target_: os.system}}}\ndefaults: [theirs]\n"
    Path("first/config.yaml").write_text(Path("first/config.yaml").read_text() + text)
    values = compose_from_run([], ["resume=first"]).values
    assert values is not None
    assert not {"hydra", "defaults"} & {*values}


def test_references_to_keys_and_run_directory_are_preserved(recorded: Recorded) -> None:
    recorded("policy=openai", "policy.model=m", "name=${policy.model}", "snapshot=every_step")
    config = composed("branch_from=first/fix@1", "policy.model=other")
    assert config["name"] == "other"
    assert config["collector"]["json"]["output_dir"] == "out/trajectories", "and not that of the other run"
    assert config["snapshot"]["output_dir"] == "out/snapshots"


def test_later_changes_of_option_files_are_ignored(recorded: Recorded, tmp_path: Path) -> None:
    option = tmp_path / "options" / "policy" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: ares_exp.policies.scripted.ScriptedPolicy\nreplies: [a]\n")
    recorded("policy=mine", config_dir=str(tmp_path / "options"))
    option.write_text("_target_: ares_exp.policies.scripted.ScriptedPolicy\nreplies: [b]\nrepeat_last: true\n")
    for verb in ("branch_from=first/fix@1", "resume=first"):
        policy = composed(verb)["policy"]
        assert (policy["replies"], policy["repeat_last"]) == (["a"], False)
    assert composed("branch_from=first/fix@1", "policy=mine")["policy"]["replies"] == ["b"], "that is chosen now"


def test_several_options_can_be_chosen_again(recorded: Recorded) -> None:
    recorded("tracker=none")
    config = composed("branch_from=first/fix@1", "tracker=[wandb,jsonl]", "tracker.wandb.project=x")
    assert [*config["tracker"]] == ["wandb", "jsonl"]
    assert config["tracker"]["wandb"]["project"] == "x"


def test_unrecorded_group_has_its_default(recorded: Recorded) -> None:
    recorded()
    for path in (Path("first/config.yaml"), Path("first/.hydra/config.yaml")):
        config = yaml.safe_load(path.read_text())
        del config["budget"]
        path.write_text(yaml.safe_dump(config))
    assert composed("replay=first")["budget"]["_target_"].endswith(".Budget")


@pytest.mark.parametrize("verb", ["resume=first", "replay=first"])
def test_incomplete_config_is_reported_as_broken(recorded: Recorded, verb: str) -> None:
    recorded()
    path = Path("first/config.yaml")
    path.write_text(path.read_text().partition("policy:")[0])
    with pytest.raises(
        ConfigError, match=r"first/config\.yaml is broken: expected the key `policy`.* Restore the file"
    ):
        compose_from_run([], [verb])


@pytest.mark.parametrize(
    "line", ["name=${now:%Y-%m-%d}", "env.tasks=['a \\${oc.env:HOME}']", "hydra.launcher.setup=['sh mine.sh']"]
)
def test_overrides_of_own_sweep_are_repeated(sweep: Callable[..., Path], line: str) -> None:
    sweep(line)
    assert line in compose_from_run([], ["resume=first"]).argv


def test_sweep_writable_by_others_is_rejected(sweep: Callable[..., Path]) -> None:
    sweep("seed=1,2").chmod(0o777)
    for typed in (["resume=first"], ["resume=first", "resume_force=true"]):
        with pytest.raises(ConfigError, match=r"`resume=true hydra.sweep.dir=.*first`"):
            compose_from_run([], typed)


@pytest.mark.parametrize("verb", ["resume=first", "replay=first", "branch_from=first/fix@1"])
def test_run_writable_by_others_needs_force(recorded: Recorded, verb: str) -> None:
    run = recorded("seed=7")
    for place in (run, run / "config.yaml", run / ".hydra", run / ".hydra/overrides.yaml"):
        mode = place.stat().st_mode
        place.chmod(0o777 if place.is_dir() else 0o666)
        with pytest.raises(ConfigError, match=r"Expected a run directory that only you can write to, got .*first"):
            compose_from_run([], [verb])
        assert compose_from_run([], [verb, "resume_force=true"]).source in (run, Path("first"))
        place.chmod(mode)
    run.chmod(0o777)
    assert composed(verb, "resume_force=true")["seed"] == 7


def test_run_of_another_user_needs_force(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        compose_from_run([], ["resume=first"])


@pytest.mark.parametrize(("members", "expected"), [([], True), (["me"], True), (["me", "you"], False)])
def test_group_of_one_user_may_write(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, members: list[str], expected: bool
) -> None:
    run = recorded()
    run.chmod(0o775)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="me", gr_mem=members))
    assert is_trusted(run) is expected


def test_masked_secrets_of_a_sweep_are_required(sweep: Callable[..., Path]) -> None:
    sweep("seed=1,2", "+policy.extra_body.api_token=***")
    with pytest.raises(ConfigError, match=r"policy\.extra_body\.api_token=…"):
        compose_from_run([], ["resume=first"])
    assert "seed=1,2" in compose_from_run([], ["resume=first", "+policy.extra_body.api_token=mine"]).argv


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["replay=first", "branch_from=first/fix@1"], "Use one per command"),
        (["replay=first/fix@1"], "Leave `@1` out"),
        (["replay=first", "policy=oracle"], "`policy` cannot be set"),
        (["branch_from=first/fix@1", "attempts=2"], "use `branches` to set the number of branches"),
        (["branch_from=first/fix"], "steps 0 to 2"),
        (["branch_from=first"], "<run>/<episode>@<step>"),
        (["branch_from=first/fix@1", "experiment=smoke"], "`experiment` cannot be set with `branch_from`"),
        (["replay=first", "branches=2"], "`branches` cannot be set with `replay`"),
        (["branches=2"], "`branches` has an effect only with a branch"),
        (["branch.inject=x", "branch_from=null"], "`branch.inject` has an effect only with a branch"),
        (["replay=first,second"], "got several"),
        (["replay=5"], "no run 5"),
    ],
)
def test_conflicting_options_are_rejected(recorded: Recorded, typed: list[str], expected: str) -> None:
    recorded()
    with pytest.raises(ConfigError) as caught:
        compose_from_run([], typed)
    assert expected in str(caught.value)


def test_invalid_recorded_override_is_an_error(sweep: Callable[..., Path]) -> None:
    sweep("seed=[")
    with pytest.raises(ConfigError, match=r"cannot be read: `seed=\["):
        compose_from_run([], ["resume=first"])


def test_replay_skips_unfinished_episodes(recorded: Recorded) -> None:
    run = recorded(tasks=[])
    with pytest.raises(ConfigError, match=r"no trajectory of a finished episode in .*\.$"):
        compose_from_run([], ["replay=first"])
    (run / "trajectories").mkdir()
    lines = list(dump_episode(chat("cut", "fix")))
    (run / "trajectories" / "cut.json").write_text("".join(lines[:2]))
    with pytest.raises(ConfigError, match="`replay=first/cut`"):
        compose_from_run([], ["replay=first"])
    assert composed("replay=first/cut")["env"]["tasks"] == ["fix"]
    write(run / "trajectories" / "e0.json", chat("e0", "sum"))
    assert composed("replay=first")["env"]["tasks"] == ["sum"]


def test_resumed_run_keeps_its_config(recorded: Recorded, tmp_path: Path) -> None:
    recorded("seed=5", "attempts=4", "env.tasks=[fix]", "env.limit=1", "policy=scripted", "policy.replies=[a]")
    derived = compose_from_run([], ["resume=first", "concurrency=2"])
    assert derived.source == tmp_path / "first"
    assert derived.argv[-1] == "concurrency=2"
    assert f'hydra.run.dir="{tmp_path / "first"}"' in derived.argv
    config = composed("resume=first", "concurrency=2", "attempts=6")
    assert (config["seed"], config["attempts"], config["concurrency"]) == (5, 6, 2)
    assert (config["env"]["tasks"], config["env"]["limit"]) == (["fix"], 1)
    assert (config["policy"]["replies"], config["resume"]) == (["a"], True)


def test_session_options_are_not_kept(recorded: Recorded) -> None:
    recorded("resume=true", "resume_force=true", "resume_redo=[lost]", "hydra.run.dir=x")
    config = composed("resume=first")
    assert (config["resume_force"], config["resume_redo"]) == (False, None)
    assert composed("resume=first", "resume_redo=[policy_error]")["resume_redo"] == ["policy_error"]


def test_branches_and_replays_resume_with_their_config(recorded: Recorded, tmp_path: Path) -> None:
    recorded("replay=old/e", "policy=replay", "policy.trajectory=old", "attempts=3", "env.tasks=[fix]")
    config = composed("resume=first")
    assert (config["replay"], config["attempts"], config["policy"]["trajectory"]) == ("old/e", 3, "old")
    branched = ["branch_from=old/e@1", "branches=4", "branch.inject=hi", "attempts=${branches}"]
    record(tmp_path / "first", branched, cwd=tmp_path)
    config = composed("resume=first")
    assert (config["branch_from"], config["attempts"], config["branch"]["inject"]) == ("old/e@1", 4, "hi")


def test_attempts_are_kept_from_the_last_session(recorded: Recorded, tmp_path: Path) -> None:
    recorded("attempts=2")
    Path("first/sessions.jsonl").write_text('{"started": 1.0, "attempts": 2}\n{"started": 2.0, "attempts": 4}\n{"atte')
    assert composed("resume=first")["attempts"] == 4
    assert composed("resume=first", "attempts=3")["attempts"] == 3
    record(tmp_path / "first", ["branch_from=old/e@1", "branches=4", "attempts=${branches}"], cwd=tmp_path)
    assert composed("resume=first", "branches=6")["attempts"] == 6


def test_resumed_sweep_stays_a_sweep(sweep: Callable[..., Path], tmp_path: Path) -> None:
    folder = sweep("seed=1,2", "resume=true", "env.path=tasks", of_hydra=["hydra.sweep.dir=first"], there="there")
    folder = folder.rename(tmp_path / "my sweep")
    argv = compose_from_run([], ["resume='my sweep'", "concurrency=2"]).argv
    assert argv == [
        "-m",
        "seed=1,2",
        f'env.path="{tmp_path / "there" / "tasks"}"',
        "resume=true",
        f'hydra.sweep.dir="{folder}"',
        "concurrency=2",
    ]
    assert compose_from_run(["--multirun"], ["resume='my sweep'"]).argv[0] == "--multirun"


@pytest.mark.parametrize(
    ("flags", "typed", "expected"),
    [
        ([], ["resume=first", "replay=first"], "Use one per command"),
        ([], ["resume=first", "hydra.run.dir=x"], "the run continues in its directory"),
        (["-m"], ["resume=first"], "Leave `-m` out"),
        ([], ["resume=first,second"], "got several"),
        ([], ["resume=nowhere"], "nowhere"),
        ([], ["resume=empty"], "nothing to resume in empty"),
        ([], ["resume="], "got no directory"),
        ([], ["resume=."], r"is a folder of runs \(first\)"),
    ],
)
def test_unsupported_resumes_are_rejected(
    recorded: Recorded, flags: list[str], typed: list[str], expected: str
) -> None:
    recorded()
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match=expected):
        compose_from_run(flags, typed)


@pytest.mark.parametrize(
    ("verb", "behind", "key", "expected"),
    [
        ("resume", "", "resume", True),
        ("replay", "", "policy.trajectory", "outputs/first"),
        ("replay", "/e0", "policy.episode", "e0"),
        ("branch_from", "/e0@1", "branch_from", "outputs/first/e0@1"),
    ],
)
def test_latest_is_resolved_to_the_run(recorded: Recorded, verb: str, behind: str, key: str, expected: object) -> None:
    run = recorded("seed=7")
    (run / "sessions.jsonl").write_text('{"started": 100.0}\n')
    Path("outputs").mkdir()
    run.rename("outputs/first")
    config = composed(f"{verb}=latest{behind}")
    assert config["seed"] == 7
    assert OmegaConf.select(OmegaConf.create(config), key) == expected
