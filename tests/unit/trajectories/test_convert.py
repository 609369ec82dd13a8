import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.atif.writer import ATIF_SUFFIX
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.trajectories.collectors.jsonl_collector import JsonlTrajectoryCollector
from ares_exp.trajectories.collectors.parquet_collector import ParquetTrajectoryCollector
from ares_exp.trajectories.commands.command_line import main
from ares_exp.trajectories.files.episode_file import read_episodes
from ares_exp.trajectories.files.formats import FORMATS, format_of, suffix_of
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.examples import examples
from tests.unit.trajectories.chats import chat
from tests.unit.trajectories.strategies import linear_trajectories, trajectories

GOLDEN = Path(__file__).parent / "golden" / "version_3.jsonl"
MANY = examples(15, suppress_health_check=list(HealthCheck))


def golden(**changes: object) -> EpisodeTrajectory:
    [episode] = list(read_episodes(GOLDEN))
    return replace(episode, **changes)  # type: ignore[arg-type]


def convert(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def written(path: Path, *episodes: EpisodeTrajectory) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    format_of(path).write(path, episodes)
    return path


def read(path: Path) -> list[EpisodeTrajectory]:
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    return [episode for item in paths for episode in format_of(item).read(item)]


def by_id(episodes: list[EpisodeTrajectory]) -> list[EpisodeTrajectory]:
    return sorted(episodes, key=lambda episode: episode.episode_id)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three finished episodes, as JSON: rewards 1, 0 and none."""
    for number, (task, reward, outcome) in enumerate(
        [("fix-a", 1.0, Outcome.COMPLETED), ("fix-b", 0.0, Outcome.TRUNCATED), ("other", None, Outcome.AGENT_ERROR)]
    ):
        episode = golden(episode_id=f"e{number}", task_name=task, total_reward=reward, outcome=outcome)
        written(tmp_path / "in" / f"e{number}.json", episode)
    return tmp_path / "in"


@MANY
@given(episodes=st.lists(trajectories(), max_size=3, unique_by=lambda episode: episode.episode_id))
def test_a_tour_of_the_lossless_formats_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, episodes: list[EpisodeTrajectory]
) -> None:
    tmp = tmp_path_factory.mktemp("tour")
    (tmp / "0").mkdir()
    for episode in episodes:
        written(tmp / "0" / f"{episode.episode_id}.json", episode)
    expected = 0 if episodes else 2
    assert convert(tmp / "0", tmp / "1.jsonl") == expected
    if episodes:
        assert convert(tmp / "1.jsonl", tmp / "2.parquet") == 0
        assert convert(tmp / "2.parquet", tmp / "3", "--to", "json", "--zstd") == 0
        assert convert(tmp / "3", tmp / "4.jsonl.zst") == 0
        assert convert(tmp / "4.jsonl.zst", tmp / "5", "--to", "parquet") == 0
        assert convert(tmp / "5", tmp / "6", "--to", "json") == 0
        assert by_id(read(tmp / "6")) == by_id(episodes)
        names = {path.name: path.read_bytes() for path in (tmp / "0").iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp / "6").iterdir()} == names
    shutil.rmtree(tmp)


@MANY
@given(episode=linear_trajectories())
def test_atif_gives_back_episodes_of_agents_that_only_append(
    tmp_path_factory: pytest.TempPathFactory, episode: EpisodeTrajectory
) -> None:
    tmp = tmp_path_factory.mktemp("atif")
    assert convert(written(tmp / "e.parquet", episode), tmp / "e.atif.json") == 0
    assert convert(tmp / "e.atif.json", tmp / "back.jsonl") == 0
    [back] = read(tmp / "back.jsonl")
    assert replace(back, steps=()) == replace(episode, steps=())
    assert [step.reward for step in back.steps] == [step.reward for step in episode.steps]
    shutil.rmtree(tmp)


def test_what_atif_cannot_hold_is_told_once_with_a_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tuple(replace(step, observation={"board": [1, 2]}) for step in golden().steps)
    source = written(tmp_path / "in.jsonl", golden(episode_id="a", steps=steps), golden(episode_id="b", steps=steps))
    assert convert(source, tmp_path / "out", "--to", "atif") == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Not held by atif")]
    assert [line for line in told if "in 2 episodes: " in line and "no chat requests" in line]
    assert len(told) == len(set(told))


def test_it_says_how_many_were_read_written_and_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "new" / "out.parquet"
    assert convert(folder, out, "--outcome", "completed", "--outcome", "truncated", "--max-reward", "0.5") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"Read 3 episodes, wrote 1 to {out} (parquet).",
        "Left out: 1 that ended as agent_error.",
        "Left out: 1 with a reward outside the bounds.",
    ]
    assert [episode.episode_id for episode in read(out)] == ["e1"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], ["e0", "e1", "e2"]),
        (["--task", "fix-*"], ["e0", "e1"]),
        (["--task", "fix-a", "--task", "other"], ["e0", "e2"]),
        (["--outcome", "agent_error"], ["e2"]),
        (["--min-reward", "1"], ["e0"]),
        (["--max-reward", "0"], ["e1"]),
        (["--min-reward=-1"], ["e0", "e1"]),
    ],
)
def test_only_wanted_episodes_are_written(folder: Path, options: list[str], kept: list[str]) -> None:
    assert convert(folder, folder.parent / "out", "--to", "jsonl", *options) == 0
    assert sorted(path.name for path in (folder.parent / "out").iterdir()) == [f"{name}.jsonl" for name in kept]


def test_no_file_is_made_of_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in (["out.parquet"], ["out", "--to=json"], ["out.jsonl", "--to=sft"]):
        assert convert(folder, folder.parent / target[0], *target[1:], "--task", "none") == 0
    assert "wrote 0" in capsys.readouterr().out
    assert [path.name for path in folder.parent.iterdir()] == ["in"]


def test_a_broken_file_is_named_and_the_others_are_converted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = folder / "e1.json"
    broken.write_bytes(broken.read_bytes().replace(b'"step_index": 2', b'"step_index": "two"'))
    (folder / "bad.parquet").write_bytes(b"PAR1")
    assert convert(folder, folder.parent / "out.jsonl") == 1
    said = capsys.readouterr()
    assert "Read 2 episodes, wrote 2" in said.out
    first, second = said.err.splitlines()
    assert f"error: {broken} at byte " in first
    assert f"error: {folder / 'bad.parquet'}: " in second
    assert [episode.episode_id for episode in read(folder.parent / "out.jsonl")] == ["e0", "e2"]


def test_a_broken_line_costs_its_episode_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "in.jsonl", golden(episode_id="a"), golden(episode_id="b"), golden(episode_id="c"))
    lines = source.read_text().splitlines(keepends=True)
    broken = next(i for i, line in enumerate(lines) if '"episode_id": "b"' in line and '"type": "step"' in line)
    lines[broken] = lines[broken].replace('"FIRST"', '"WORST"')
    source.write_text("".join(lines))
    assert convert(source, tmp_path / "out.parquet") == 1
    assert [episode.episode_id for episode in read(tmp_path / "out.parquet")] == ["a", "c"]
    assert "got 'WORST'" in capsys.readouterr().err


def test_an_episode_that_contradicts_itself_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.json").write_text(json.dumps(replace(golden(), num_steps=77).to_dict()))
    assert convert(tmp_path / "e.json", tmp_path / "out.parquet") == 1
    assert re.search(r"e\.json.*: expected 77 steps, got", capsys.readouterr().err)
    assert not (tmp_path / "out.parquet").exists()


def test_a_run_directory_gives_each_episode_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    collectors = (
        JsonTrajectoryCollector(run / "trajectories"),
        JsonlTrajectoryCollector(run / "trajectories.jsonl"),
        ParquetTrajectoryCollector(run / "parquet"),
    )
    for collector in collectors:
        for name in ("a", "b", "unfinished"):
            collector.begin_episode(task_name="t", episode_id=name)
            for step in golden().steps[: -1 if name == "unfinished" else None]:
                collector.record_step(step)
            if name != "unfinished":
                collector.end_episode()
    assert convert(run, tmp_path / "out.parquet") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Read 2 episodes, wrote 2 ")
    assert "that are running" in said[1]
    assert [(episode.episode_id, episode.steps) for episode in read(tmp_path / "out.parquet")] == [
        ("a", golden().steps),
        ("b", golden().steps),
    ]
    for collector in collectors:
        collector.end_episode()
        collector.close()


def test_several_inputs_with_the_same_episode_give_it_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(folder, folder / "e0.json", folder.parent / "out.jsonl") == 0
    assert "Left out: 1 with the id of another that was read before." in capsys.readouterr().out
    assert len(read(folder.parent / "out.jsonl")) == 3


def test_nothing_is_overwritten_without_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "out.parquet"
    out.write_text("precious")
    assert convert(folder, out) == 2
    assert out.read_text() == "precious"
    assert "`--force` overwrites it" in capsys.readouterr().err
    assert convert(folder, out, "--force") == 0
    assert len(read(out)) == 3
    assert convert(folder, folder, "--to", "json") == 2
    assert "has some" in capsys.readouterr().err
    before = read(folder)
    assert convert(folder, folder, "--to", "json", "--force") == 0
    assert read(folder) == before
    assert convert(out, out, "--force", "--task", "other") == 0
    assert [episode.episode_id for episode in read(out)] == ["e2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out"], "Expected `--to FORMAT`, as the name"),
        (["out.csv"], "of json, jsonl, parquet, atif, sft, preference"),
        (["out.json"], "Expected one episode for the file"),
        (["out.atif.json"], "Expected one episode for the file"),
        (["out.json", "--to=parquet"], "Expected the name of a file of parquet to end with .parquet, got"),
        (["out", "--to=sft"], "Expected OUT to be a file that ends with .jsonl or .jsonl.zst, got"),
        (["out.jsonl", "--zstd"], "Expected the name of a compressed file to end with .jsonl.zst, got"),
        (["out", "--to=atif", "--zstd"], "Expected no `--zstd` with `--to atif`"),
        (["out.jsonl", "--columns"], "Expected `--columns` only with `--to sft or preference`"),
        (["out.jsonl", "--to=sft", "--min-margin=1"], "Expected `--min-margin` only with `--to preference`"),
        (["out.jsonl", "--to=preference", "--pairs-per-task=-1"], "at least 1 pair a task, got -1"),
        (["in/e0.json/out.jsonl"], "Cannot write "),
    ],
)
def test_mistakes_are_told_and_leave_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert convert(folder, folder.parent / arguments[0], *arguments[1:]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert [path.name for path in folder.parent.iterdir()] == ["in"]


def test_missing_and_empty_inputs_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(tmp_path / "no", tmp_path / "out.jsonl") == 2
    assert "No such file" in capsys.readouterr().err
    assert convert(tmp_path, tmp_path / "out.jsonl") == 2
    assert "found none" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", ".hidden", "a b", "x" * 300, "\udc80", ".."])
def test_an_id_that_is_no_file_name_stays_in_the_folder(tmp_path: Path, name: str) -> None:
    source = written(tmp_path / "in.jsonl", golden(episode_id=name))
    assert convert(source, tmp_path / "out", "--to", "json") == 0
    [path] = (tmp_path / "out").iterdir()
    assert suffix_of(path) == ".json"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["in.jsonl", "out"]
    assert read(tmp_path / "out") == [golden(episode_id=name)]


def test_rows_for_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "in.jsonl", golden(episode_id="good", total_reward=1.0), golden(episode_id="bad", error=ErrorInfo("E", "x"), total_reward=0.0))  # fmt: skip  # noqa: E501
    assert convert(source, tmp_path / "sft.jsonl", "--to", "sft", "--min-reward", "1", "--columns") == 0
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert rows
    assert {row["episode_id"] for row in rows} == {"good"}
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert f"wrote {len(rows)} rows" in capsys.readouterr().out
    assert convert(source, tmp_path / "preference.jsonl.zst", "--to", "preference") == 0
    assert "Left out: 1 pair of attempts that are equal." in capsys.readouterr().out


def of_oracle(episode: EpisodeTrajectory) -> EpisodeTrajectory:
    steps = tuple(
        replace(step, action={**step.action, "model": "oracle"}) if step.action is not None else step
        for step in episode.steps
    )
    return replace(episode, steps=steps)


@pytest.mark.parametrize(
    ("options", "kept", "told"),
    [
        ([], ["good"], ["Left out: 1 played by the oracle", "Left out: 1 with a reward below 1 (`--failed`"]),
        (["--failed"], ["bad", "good"], ["Among them: 1 episode with a reward below 1.", "Left out: 1 played by"]),
        (["--oracle"], ["good", "solution"], ["Among them: 1 episode of the oracle.", "Left out: 1 with a reward"]),
        (["--min-reward=0.5"], ["good"], ["Left out: 1 played by the oracle"]),
        (["--max-reward=0.5"], ["bad"], ["Among them: 1 episode with a reward below 1."]),
    ],
)
def test_supervised_training_takes_the_successes_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], kept: list[str], told: list[str]
) -> None:
    played = chat("good", "a"), chat("bad", "b", reward=0.0), of_oracle(chat("solution", "c"))
    source = written(tmp_path / "in.jsonl", *played)
    assert convert(source, tmp_path / "sft.jsonl", "--to", "sft", "--columns", *options) == 0
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert sorted({row["episode_id"] for row in rows}) == kept
    said = capsys.readouterr().out
    assert all(sentence in said for sentence in told), said


def test_pairs_are_of_a_model_if_not_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "in.jsonl", chat("bad", length=3, reward=0.0), of_oracle(chat("solution")))
    assert convert(source, tmp_path / "pairs.jsonl", "--to", "preference") == 0
    assert not (tmp_path / "pairs.jsonl").exists()
    assert "Left out: 1 played by the oracle (`--oracle` takes them, too)." in capsys.readouterr().out
    assert convert(source, tmp_path / "pairs.jsonl", "--to", "preference", "--oracle") == 0
    assert "Among them: 1 episode of the oracle." in capsys.readouterr().out
    assert len((tmp_path / "pairs.jsonl").read_text().splitlines()) == 1


def test_every_format_is_known_by_its_suffixes() -> None:
    for item in FORMATS.values():
        for suffix in item.suffixes:
            assert format_of(Path(f"a.b{suffix}")) is item
            assert suffix_of(Path(f"a.b{suffix}")) == suffix
    assert FORMATS["atif"].suffixes == (ATIF_SUFFIX,)
    assert suffix_of(Path("summary.txt")) is None
    assert suffix_of(Path(".json")) is None
