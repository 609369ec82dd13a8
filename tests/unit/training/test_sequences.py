"""Token sequences: of episodes, of recorded episodes, and as the rows that trainers take."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ares_exp.commands.cli.run_command import run_command
from ares_exp.errors import UntrainableError, UserError
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.endpoint_policy import SAMPLING_FIELDS
from ares_exp.policies.in_process.sampling import NEUTRAL_SAMPLING, PROCESSED_LOGPROBS
from ares_exp.records.run_dir import RunDir
from ares_exp.training.recorded_sequences import RecordedSequences, write_sequences
from ares_exp.training.sampled_calls import NEUTRAL
from ares_exp.training.sequences import SequenceReport, TrainingSequence, sequences_of
from ares_exp.training.skyrl import generator_output
from ares_exp.training.verl import agent_loop_output, agent_loop_outputs
from ares_exp.trajectories import JsonTrajectoryCollector, load
from ares_exp.trajectories.collectors import JsonlTrajectoryCollector
from ares_exp.trajectories.files.line_file import read_lines
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.unit.training.sampled_episodes import Call, check_rule, episode
from tests.unit.training.trainer_types import AgentLoopOutput, GeneratorOutput, check_generator_output

FIRST = Call([1, 2, 3], [10, 11], version="16")
SECOND = Call([1, 2, 3, 10, 11, 4, 5], [20], version="17")
"""Goes on exactly where the first ended."""

RETOKENISED = Call([1, 2, 3, 1011, 4, 5], [20, 21])
"""The same text as `SECOND`'s history, perhaps: other ids."""


def test_continued_calls_become_one_row() -> None:
    report = sequences_of(episode([FIRST, SECOND], attempt=2))
    (row,) = report.rows
    assert row.ids == (1, 2, 3, 10, 11, 4, 5, 20)
    assert row.mask == (0, 0, 0, 1, 1, 0, 0, 1)
    assert row.logprobs == (0, 0, 0, *FIRST.logprobs, 0, 0, *SECOND.logprobs)
    assert (row.reward, row.rewards, row.task, row.attempt) == (1.0, {"reward": 1.0}, "task", 2)
    assert (row.conversation, row.episode_id, row.policy_versions) == ("main", "e1", ("16", "17"))
    assert (row.steps, row.starts, row.made) == ((1, 2), (3, 7), "clean")
    assert row.prompt_ids == (1, 2, 3)
    assert row.response_ids == (10, 11, 4, 5, 20)
    assert row.response_mask == (1, 1, 0, 0, 1)
    assert row.response_logprobs == (*FIRST.logprobs, 0, 0, *SECOND.logprobs)
    assert (report.made, report.calls) == ({"clean": 1}, 2)


def test_retokenized_calls_fork_without_duplicate_training() -> None:
    report = sequences_of(episode([FIRST, RETOKENISED]))
    kept, forked = report.rows
    assert (kept.ids, kept.mask) == ((1, 2, 3, 10, 11), (0, 0, 0, 1, 1))
    assert (forked.ids, forked.mask) == ((1, 2, 3, 1011, 4, 5, 20, 21), (0, 0, 0, 0, 0, 0, 1, 1))
    assert (kept.made, forked.made) == ("clean", "forked")
    assert report.made == {"clean": 1, "forked": 1}


def test_rewritten_history_forks_into_separate_rows() -> None:
    compacted = Call([1, 9, 9], [30])
    of_first = Call([1, 2, 3, 10, 11, 4, 5, 20, 6], [40])
    of_compacted = Call([1, 9, 9, 30, 7], [50])
    calls = [FIRST, SECOND, compacted, of_first, of_compacted]
    report = sequences_of(episode(calls))
    assert [row.steps for row in report.rows] == [(1, 2, 4), (3, 5)]
    assert check_rule(report.rows, calls) == 2 + 1 + 1 + 1 + 1


def test_longest_matching_row_is_continued() -> None:
    again = Call(FIRST.prompt, [10])
    report = sequences_of(episode([FIRST, again, SECOND]))
    assert [row.steps for row in report.rows] == [(1, 3), (2,)]


def test_row_end_is_realigned_if_allowed() -> None:
    other_end = Call([1, 2, 3, 10, 99, 4], [20])  # the template closes the turn with another token than was sampled
    report = sequences_of(episode([FIRST, other_end]), realign_tokens=1)
    (row,) = report.rows
    assert (row.ids, row.mask) == ((1, 2, 3, 10, 99, 4, 20), (0, 0, 0, 1, 0, 0, 1))
    assert (row.made, report.made, report.untrained_tokens) == ("realigned", {"realigned": 1}, 1)
    assert check_rule(report.rows, [FIRST, other_end]) == 2
    assert len(sequences_of(episode([FIRST, other_end])).rows) == 2
    assert "1 sampled token" in report.sentences()[1]


def test_realignment_preserves_a_token_of_last_call() -> None:
    """Another conversation shares the start of every chat: that is no reason to throw a short answer away."""
    short, other = Call([1, 2], [10]), Call([1, 7, 7], [20])
    assert [row.steps for row in sequences_of(episode([short, other]), realign_tokens=5).rows] == [(1,), (2,)]


def test_other_conversations_are_included_on_request() -> None:
    calls = [FIRST, Call([7], [8], "sub-1a"), SECOND, Call([7, 8, 9], [5], "sub-1a"), Call([1, 2, 3], [4], "side-2b")]
    alone, subs, everything = (
        sequences_of(episode(calls), conversations=conversations)
        for conversations in (("main",), ("main", "sub-*"), ("*",))
    )
    assert [row.conversation for row in alone.rows] == ["main"]
    assert alone.other_conversations == {"sub-1a": 2, "side-2b": 1}
    assert [(row.conversation, row.steps) for row in subs.rows] == [("main", (1, 3)), ("sub-1a", (2, 4))]
    assert [row.conversation for row in everything.rows] == ["main", "sub-1a", "side-2b"]
    assert all(row.made == "clean" for row in everything.rows)
    assert "3 calls of other conversations (side-2b, sub-1a)" in alone.sentences()[1]
    with pytest.raises(ValueError, match="a list of names"):
        sequences_of(episode(calls), conversations="main")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"prompt_token_ids": None}, "no `prompt_token_ids`.*policy=vllm"),
        ({"completion_token_ids": None}, "no `completion_token_ids`"),
        ({"logprobs": None}, "no `logprobs`.*policy=transformers"),
        ({"logprobs": [-0.5]}, "2 sampled tokens and 1 log-prob"),
        ({"logprobs": [-0.5, float("nan")]}, "must be a list of log-probabilities"),
        ({"logprobs": [-0.5, 0.5]}, "must be a list of log-probabilities"),
        ({"logprobs": [-0.5, float("-inf")]}, "must be a list of log-probabilities"),
        ({"completion_token_ids": [1, -1]}, "must be a list of ids"),
        ({"completion_token_ids": [1, True]}, "must be a list of ids"),
        ({"completion_token_ids": [], "logprobs": []}, "3 prompt tokens and 0 sampled tokens"),
        ({"prompt_token_ids": []}, "0 prompt tokens and 2 sampled tokens"),
        ({"sampling": {"temperature": 0.7}}, "temperature 0.7, expected 1"),
        ({"sampling": {"temperature": 1.0, "top_p": 0.9}}, "`top_p=0.9`"),
        ({"sampling": {"top_k": 20}}, "`top_k=20`"),
        ({"sampling": {"min_p": 0.05}}, "`min_p=0.05`"),
        ({"sampling": {"repetition_penalty": 1.1}}, "`repetition_penalty=1.1`"),
        ({"sampling": {"response_format": {"type": "json_object"}}}, "`response_format="),
    ],
)
def test_invalid_samples_are_refused_by_name(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(UntrainableError, match=message) as refused:
        sequences_of(episode([FIRST], model="tiny", **broken))
    assert "by tiny at step 1 of episode e1 (task)" in str(refused.value)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LLMRequest([{"role": "user", "content": "x"}], tool_choice="required"), "tool_choice='required'"),
        (
            LLMRequest([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]),
            r"do not represent \(image_url\)",
        ),
    ],
)
def test_requests_that_alter_sampling_are_refused(request_: LLMRequest, message: str) -> None:
    with pytest.raises(UntrainableError, match=message):
        sequences_of(episode([FIRST], request=request_))


def test_policies_record_all_sampling_parameters() -> None:
    """What is not on record could not be refused."""
    assert set(NEUTRAL) - set(SAMPLING_FIELDS) == set()


def test_neutral_values_of_token_endpoints_are_trainable() -> None:
    assert sequences_of(episode([FIRST], sampling=NEUTRAL_SAMPLING)).made == {"clean": 1}


def test_unrecorded_sampling_defaults_to_the_request() -> None:
    with pytest.raises(UntrainableError, match=r"top_p=0\.5"):
        sequences_of(episode([FIRST], request=LLMRequest([], top_p=0.5), sampling=None))
    report = sequences_of(episode([FIRST], sampling=None))
    assert report.unstated_sampling == 1
    assert "1 call recorded without a temperature" in report.sentences()[-1]


def test_sampling_left_to_the_engine_is_reported() -> None:
    left = {"temperature": 1.0, "top_k": None, "seed": None}
    assert sequences_of(episode([FIRST], sampling=left)).unstated_sampling == 1
    assert sequences_of(episode([FIRST], sampling={"temperature": 1.0, "seed": None})).unstated_sampling == 0


def test_altered_sampling_is_accepted_only_on_request() -> None:
    neutral = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": True, "max_tokens": 5}
    assert sequences_of(episode([FIRST], sampling=neutral)).unstated_sampling == 0
    altered = episode([FIRST], sampling={"temperature": 0.7, "top_p": 0.9})
    assert sequences_of(altered, temperature=0.7, altered_sampling=True).made == {"clean": 1}
    assert sequences_of(altered, temperature=None, altered_sampling=True).made == {"clean": 1}
    with pytest.raises(UntrainableError, match="--logprobs-mode processed_logprobs"):
        sequences_of(altered, temperature=0.7)
    processed = {"temperature": 0.7, **PROCESSED_LOGPROBS}
    assert sequences_of(episode([FIRST], sampling=processed), temperature=0.7).made == {"clean": 1}
    with pytest.raises(UntrainableError, match="top_p"):
        sequences_of(episode([FIRST], sampling={**processed, "top_p": 0.9}), temperature=0.7)


def test_episode_without_sampled_tokens_is_refused() -> None:
    with pytest.raises(UntrainableError, match=r"e1 \(task\) has no sampled tokens"):
        sequences_of(episode([]))
    with pytest.raises(UntrainableError, match=r"main\. Its other conversations are sub-1"):
        sequences_of(episode([replace(FIRST, conversation="sub-1")]))


def test_rows_from_dict_and_file_match_memory(tmp_path: Path) -> None:
    whole = episode([FIRST, SECOND, RETOKENISED])
    expected = sequences_of(whole)
    assert sequences_of(whole.to_dict()) == expected
    collector = JsonTrajectoryCollector(tmp_path)
    handle = collector.begin_episode(task_name="task", metadata=whole.metadata, episode_id="e1", start_time=0.0)
    for record in whole.steps:
        collector.record_step(record, episode=handle)
    collector.end_episode(episode=handle, rewards=whole.rewards)
    (stored,) = load(tmp_path)
    assert sequences_of(stored) == expected


@st.composite
def histories(draw: st.DrawFn) -> list[Call]:
    """Calls of an agent that goes on, rewrites, retokenises and asks again, in two conversations."""
    token = st.integers(0, 3)  # few ids: starts coincide by chance, too
    spoken = st.lists(token, min_size=1, max_size=3)
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 7))):
        conversation = draw(st.sampled_from(["main", "sub-1"]))
        earlier = [call for call in calls if call.conversation == conversation]
        base: list[int] = []
        if earlier:
            past = draw(st.sampled_from(earlier))
            base = [*past.prompt, *past.completion]
        cut = draw(st.sampled_from([0, 0, 0, 1, 2, len(base)]))
        prompt = [*base[: len(base) - cut], *draw(st.lists(token, max_size=3))]
        calls.append(Call(prompt or [0], draw(spoken), conversation))
    return calls


@given(histories(), st.integers(0, 2))
def test_rule_holds_for_any_history(calls: list[Call], realign_tokens: int) -> None:
    report = sequences_of(episode(calls), conversations=["*"], realign_tokens=realign_tokens)
    trained = check_rule(report.rows, calls)
    assert trained == sum(len(call.completion) for call in calls) - report.untrained_tokens
    assert report.untrained_tokens == 0 or realign_tokens
    assert sorted(step for row in report.rows for step in row.steps) == list(range(1, len(calls) + 1))
    for row in report.rows:
        assert all(row.mask[at] and not any(row.mask[: row.starts[0]]) for at in row.starts)


REWRITTEN = Call([1, 9], [30], version="17")
LINEAR = sequences_of(episode([FIRST, SECOND], finish_reason="length"))
FORKED = sequences_of(episode([FIRST, REWRITTEN], reward=0.5, name="e2"))
UNSCORED = sequences_of(episode([FIRST], reward=None))
NO_CALLS = SequenceReport((), 0)
RESPONSE, MASK = [10, 11, 4, 5, 20], [1, 1, 0, 0, 1]
LOGPROBS = [*FIRST.logprobs, 0.0, 0.0, *SECOND.logprobs]


def test_episode_becomes_one_verl_output() -> None:
    output = TypeAdapter(AgentLoopOutput).validate_python(agent_loop_output(LINEAR), strict=True)
    assert (output.prompt_ids, output.response_ids, output.response_mask) == ([1, 2, 3], RESPONSE, MASK)
    assert (output.response_logprobs, output.reward_score, output.num_turns) == (LOGPROBS, 1.0, 4)
    assert output.extra_fields["reward_extra_info"] == {"scored": 1.0}
    assert output.extra_fields["rewards"] == {"reward": 1.0}
    assert output.extra_fields["policy_versions"] == ["16", "17"]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (16, 17)
    assert agent_loop_output(LINEAR).keys() <= AgentLoopOutput.model_fields.keys()


def test_rewritten_history_becomes_several_outputs_or_error() -> None:
    outputs = [AgentLoopOutput(**fields) for fields in agent_loop_outputs(FORKED)]
    assert [output.response_ids for output in outputs] == [[10, 11], [30]]
    assert [output.reward_score for output in outputs] == [0.5, 0.5]
    with pytest.raises(UntrainableError, match=r"e2 \(task\) to have one training row, got 2, of which 1 are"):
        agent_loop_output(FORKED)


def test_batch_becomes_one_skyrl_output() -> None:
    output: GeneratorOutput = TypeAdapter(GeneratorOutput).validate_python(
        generator_output([LINEAR, LINEAR], trajectory_ids=["a", "b"]), strict=True
    )
    check_generator_output(output, prompts=2)
    assert output["is_last_step"] is None
    assert output["prompt_token_ids"] == [[1, 2, 3]] * 2
    assert output["response_ids"] == [RESPONSE] * 2
    assert output["loss_masks"] == [MASK] * 2
    assert output["rollout_logprobs"] == [LOGPROBS] * 2
    assert output["rewards"] == [1.0, 1.0]
    assert output["stop_reasons"] == ["length", "length"]


def test_rewritten_history_becomes_skyrl_steps() -> None:
    output: GeneratorOutput = TypeAdapter(GeneratorOutput).validate_python(
        generator_output([LINEAR, FORKED, LINEAR], trajectory_ids=["a", "b", "c"]), strict=True
    )
    check_generator_output(output, prompts=3)
    assert output["trajectory_ids"] == ["a", "b", "b", "c"]
    assert output["is_last_step"] == [True, False, True, True]
    assert output["rewards"] == [1.0, 0.5, 0.5, 1.0]
    with pytest.raises(UntrainableError, match=r"Episode e2 \(task\) has several training rows"):
        generator_output([LINEAR, FORKED], step_wise=False)
    with pytest.raises(ValueError, match="Expected 2 trajectory ids, got 0"):
        generator_output([LINEAR, FORKED])


def test_verl_needs_integer_policy_versions() -> None:
    for call, message in (
        (Call([1], [2], version="v1"), "global steps of verl, got v1"),
        (Call([1], [2]), "has no policy"),
    ):
        with pytest.raises(UntrainableError, match=message):
            agent_loop_outputs(sequences_of(episode([call])))
    [output] = agent_loop_outputs(sequences_of(episode([Call([1], [2])])), global_step=7)
    assert output["extra_fields"]["max_global_steps"] == 7


@pytest.mark.parametrize("report", [UNSCORED, NO_CALLS])
def test_verl_masks_lost_episodes_or_drops_groups(report: SequenceReport) -> None:
    output = AgentLoopOutput(**agent_loop_output(report))
    assert (set(output.response_mask), output.reward_score) == ({0}, 0.0)
    assert isinstance(output.extra_fields["min_global_steps"], int)
    assert output.extra_fields["reward_extra_info"] == {"scored": 0.0}
    with pytest.raises(UntrainableError, match="has no reward"):
        agent_loop_output(report, lost="group")


@pytest.mark.parametrize(("lost", "masked"), [("group", [True, True, False]), ("mask", [False, True, False])])
@pytest.mark.parametrize("report", [UNSCORED, NO_CALLS])
def test_skyrl_masks_lost_episodes_or_groups(
    report: SequenceReport, lost: Literal["group", "mask"], masked: list[bool]
) -> None:
    ids = [SimpleNamespace(instance_id="a"), SimpleNamespace(instance_id="a"), SimpleNamespace(instance_id="b")]
    output: GeneratorOutput = TypeAdapter(GeneratorOutput).validate_python(
        generator_output([LINEAR, report, LINEAR], trajectory_ids=ids, lost=lost), strict=True
    )
    check_generator_output(output, prompts=3)
    assert [not any(mask) for mask in output["loss_masks"]] == masked
    assert output["rewards"] == [1.0, 0.0, 1.0]


COLLECTORS = {
    "json": lambda run: JsonTrajectoryCollector(run / "trajectories"),
    "jsonl": lambda run: JsonlTrajectoryCollector(run / "trajectories.jsonl"),
}


def start(collector: Any, whole: EpisodeTrajectory) -> Any:
    handle = collector.begin_episode(task_name="task", metadata=whole.metadata, episode_id=whole.episode_id)
    for record in whole.steps:
        collector.record_step(record, episode=handle)
    return handle


def record(collector: Any, whole: EpisodeTrajectory) -> None:
    collector.end_episode(episode=start(collector, whole), rewards=whole.rewards)


def a_run(path: Path, *episodes: EpisodeTrajectory) -> Path:
    collector = COLLECTORS["json"](path)
    for whole in episodes:
        record(collector, whole)
    collector.close()
    return path


def export(*arguments: object) -> int:
    return run_command("export", [*map(str, arguments), "--to", "tokens"], "ares-exp export")


def ids(reports: Iterator[Any]) -> list[str]:
    return [report.rows[0].episode_id for report in reports]


@pytest.mark.parametrize("form", COLLECTORS)
def test_finished_episodes_of_running_run_are_read_once(tmp_path: Path, form: str) -> None:
    collector = COLLECTORS[form](tmp_path)
    recorded = RecordedSequences(tmp_path)
    record(collector, episode([FIRST], name="a"))
    in_progress = start(collector, episode([FIRST, SECOND], name="b"))
    assert ids(recorded.new()) == ["a"]
    assert ids(recorded.new()) == []
    collector.end_episode(episode=in_progress)
    assert ids(recorded.new()) == ["b"]
    collector.close()
    assert ids(RecordedSequences(tmp_path).new()) == ["a", "b"]
    assert recorded.sentences() == ["2 rows of 3 calls, 5 tokens trained on: 2 clean, 0 re-aligned, 0 forked."]


async def test_following_ends_when_the_run_ends(tmp_path: Path) -> None:
    run, found = RunDir(tmp_path), []
    collector = COLLECTORS["json"](tmp_path)
    with run.owned():
        record(collector, episode([FIRST], name="a"))
        follower = RecordedSequences(tmp_path).follow(poll_sec=0.001)
        found.append(await anext(follower))
        record(collector, episode([FIRST], name="b"))
        found.append(await anext(follower))
        record(collector, episode([FIRST], name="c"))
    found += [report async for report in follower]
    assert [report.rows[0].episode_id for report in found] == ["a", "b", "c"]


async def test_directory_without_a_run_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run that has started"):
        await anext(RecordedSequences(tmp_path).follow())


def test_episodes_without_rows_are_counted_and_named(tmp_path: Path) -> None:
    run = a_run(
        tmp_path,
        episode([FIRST, REWRITTEN], name="a"),
        episode([FIRST], name="b", logprobs=None),
        episode([FIRST], name="c", reward=None),
    )
    recorded = RecordedSequences(run)
    assert ids(recorded.new()) == ["a"]
    assert dict(recorded.left_out) == {
        "episodes that cannot be trained on": 1,
        "episodes without a reward": 1,
    }
    assert recorded.sentences()[:2] == [
        "2 rows of 2 calls, 3 tokens trained on: 1 clean, 0 re-aligned, 1 forked.",
        "Left out: 1 episode that cannot be trained on.",
    ]
    assert "at step 1 of episode b (task) has no `logprobs`" in recorded.sentences()[-1]


def read(path: Path) -> list[dict[str, Any]]:
    if path.name.endswith(".parquet"):
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    with read_lines(path) as lines:
        return [json.loads(line.text) for line in lines]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.jsonl.zst"])
def test_rows_round_trip_through_files(tmp_path: Path, name: str) -> None:
    rows = [
        *sequences_of(episode([FIRST, SECOND, REWRITTEN], attempt=3, finish_reason="stop")).rows,
        *sequences_of(episode([Call([1], [2], "sub-1")], reward=None), conversations=["*"]).rows,
    ]
    write_sequences(tmp_path / name, rows)
    back = [
        row | {"rewards": {item["name"]: item["value"] for item in row["rewards"]}} for row in read(tmp_path / name)
    ]
    assert [TypeAdapter(TrainingSequence).validate_python(row) for row in back] == rows
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_secrets_and_lone_surrogates_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789abcdef")
    secret = "sk-0123456789abcdef\ud83d"
    row = replace(sequences_of(episode([FIRST])).rows[0], task=secret, policy_versions=(secret,), rewards={secret: 1.0})
    for name in ("rows.parquet", "rows.jsonl"):
        write_sequences(tmp_path / name, [row])
        assert "0123456789abcdef" not in repr(read(tmp_path / name))
    read(tmp_path / "rows.parquet")[0]["task"].encode()


def test_lists_of_different_lengths_are_refused() -> None:
    (row,) = sequences_of(episode([FIRST])).rows
    with pytest.raises(ValueError, match=r"\(5\), got 4 and 5"):
        replace(row, mask=row.mask[1:])


def test_command_writes_rows_and_reports_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(
        tmp_path / "run", episode([FIRST, REWRITTEN]), episode([replace(FIRST, conversation="sub-1")], name="b")
    )
    out = tmp_path / "new" / "rows.parquet"
    assert export(run, out) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[:2] == [
        f"Wrote {out}.",
        "2 rows of 2 calls, 3 tokens trained on: 1 clean, 0 re-aligned, 1 forked.",
    ]
    assert "no sampled tokens in the conversations main. Its other conversations are sub-1" in said
    assert [row["steps"] for row in read(out)] == [[1], [2]]
    assert export(run, out, "--force", "--conversation", "*") == 0
    assert len(read(out)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["out.csv"], "ends in .jsonl or .jsonl.zst or .parquet"),
        (["rows.jsonl", "--realign-tokens", "-1"], "at least 0, got -1"),
        (["rows.jsonl", "--temperature", "warm"], "a number or `any`, got 'warm'"),
        (["rows.jsonl", "--min-reward", "2"], "can be exported to tokens. Left out: 1 episode with a reward below 2"),
        (["rows.jsonl", "--temperature", "0.7"], "temperature 1.0, expected 0.7"),
    ],
)
def test_command_refuses_an_empty_result(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(a_run(tmp_path, episode([FIRST])))
    assert export(".", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("rows*"))
