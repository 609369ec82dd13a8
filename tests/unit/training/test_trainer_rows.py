"""Rows in the forms of TRL, verl and SkyRL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest
from pydantic import TypeAdapter

from ares_exp.errors import UntrainableError
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.training.driver import DrivenEpisode
from ares_exp.training.rounds import Group
from ares_exp.training.sequences import SequenceReport, sequences_of
from ares_exp.training.skyrl import generator_output
from ares_exp.training.trl import TrainedRow, rows_of
from ares_exp.training.verl import agent_loop_output, agent_loop_outputs
from tests.unit.training.sampled_episodes import Call, episode
from tests.unit.training.trainer_types import AgentLoopOutput, GeneratorOutput, check_generator_output

FIRST = Call([1, 2, 3], [10, 11], version="16")
SECOND = Call([1, 2, 3, 10, 11, 4, 5], [20], version="17")
REWRITTEN = Call([1, 9], [30], version="17")
LINEAR = sequences_of(episode([FIRST, SECOND], finish_reason="length"))
FORKED = sequences_of(episode([FIRST, REWRITTEN], reward=0.5, name="e2"))
UNSCORED = sequences_of(episode([FIRST], reward=None))
NO_CALLS = SequenceReport((), 0)
RESPONSE, MASK = [10, 11, 4, 5, 20], [1, 1, 0, 0, 1]
LOGPROBS = [*FIRST.logprobs, 0.0, 0.0, *SECOND.logprobs]


def test_an_episode_is_one_output_of_a_verl_agent_loop() -> None:
    output = TypeAdapter(AgentLoopOutput).validate_python(agent_loop_output(LINEAR), strict=True)
    assert (output.prompt_ids, output.response_ids, output.response_mask) == ([1, 2, 3], RESPONSE, MASK)
    assert (output.response_logprobs, output.reward_score, output.num_turns) == (LOGPROBS, 1.0, 4)
    assert output.extra_fields["reward_extra_info"] == {"reward": 1.0}
    assert output.extra_fields["policy_versions"] == ["16", "17"]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (16, 17)
    assert agent_loop_output(LINEAR).keys() <= AgentLoopOutput.model_fields.keys()


def test_a_rewritten_history_is_several_outputs_or_refused() -> None:
    outputs = [AgentLoopOutput(**fields) for fields in agent_loop_outputs(FORKED)]
    assert [output.response_ids for output in outputs] == [[10, 11], [30]]
    assert [output.reward_score for output in outputs] == [0.5, 0.5]
    with pytest.raises(UntrainableError, match=r"e2 \(task\), got 2, 1 of them forked"):
        agent_loop_output(FORKED)


def test_a_batch_is_the_output_of_a_skyrl_generator() -> None:
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


def test_a_rewritten_history_is_steps_of_a_skyrl_trajectory() -> None:
    output: GeneratorOutput = TypeAdapter(GeneratorOutput).validate_python(
        generator_output([LINEAR, FORKED, LINEAR], trajectory_ids=["a", "b", "c"]), strict=True
    )
    check_generator_output(output, prompts=3)
    assert output["trajectory_ids"] == ["a", "b", "b", "c"]
    assert output["is_last_step"] == [True, False, True, True]
    assert output["rewards"] == [1.0, 0.5, 0.5, 1.0]
    with pytest.raises(UntrainableError, match=r"episode e2 \(task\), got more"):
        generator_output([LINEAR, FORKED], step_wise=False)
    with pytest.raises(ValueError, match="Expected 2 trajectory ids, got 0"):
        generator_output([LINEAR, FORKED])


def test_verl_needs_integer_policy_versions() -> None:
    for call, message in ((Call([1], [2], version="v1"), "global steps of verl, got v1"), (Call([1], [2]), "got none")):
        with pytest.raises(UntrainableError, match=message):
            agent_loop_outputs(sequences_of(episode([call])))
    [output] = agent_loop_outputs(sequences_of(episode([Call([1], [2])])), global_step=7)
    assert output["extra_fields"]["max_global_steps"] == 7


@pytest.mark.parametrize("report", [UNSCORED, NO_CALLS])
def test_verl_masks_lost_episodes_or_drops_groups(report: SequenceReport) -> None:
    output = AgentLoopOutput(**agent_loop_output(report))
    assert (set(output.response_mask), output.reward_score) == ({0}, 0.0)
    assert isinstance(output.extra_fields["min_global_steps"], int)
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


def ended(*calls: Call, reward: float | None = 1.0, attempt: int = 0) -> DrivenEpisode:
    outcome = Outcome.COMPLETED if reward is not None else Outcome.AGENT_ERROR
    result = EpisodeResult(episode_id="e", task_name="task", attempt=attempt, seed=0, outcome=outcome, reward=reward)
    return DrivenEpisode(result, episode(calls, reward=reward))


def test_a_group_is_as_many_rows_of_trl() -> None:
    """A forked episode gives its longest row; one without a reward, or that is lacking, a row with nothing to train."""
    episodes = (ended(FIRST, SECOND), ended(REWRITTEN, FIRST, reward=0.5), ended(FIRST, reward=None))
    rows = rows_of([Group("task", episodes)], group_size=4, pad=9)
    assert rows.to_dict() == {
        "prompt_ids": [[1, 2, 3], [1, 2, 3], [9], [9]],
        "completion_ids": [RESPONSE, [10, 11], [9], [9]],
        "env_mask": [MASK, [1, 1], [0], [0]],
        "logprobs": [LOGPROBS, FIRST.logprobs, [0.0], [0.0]],
        "episode_reward": [1.0, 0.5, None, None],
    }
    assert (rows.left_out, rows.forked) == (1, 1)
    assert rows.trained() == [
        TrainedRow([1, 2, 3, *RESPONSE], [0, 0, 0, *MASK], [0.0, 0.0, 0.0, *LOGPROBS]),
        TrainedRow([1, 2, 3, 10, 11], [0, 0, 0, 1, 1], [0.0, 0.0, 0.0, *FIRST.logprobs]),
    ]


def test_a_group_that_is_left_out_keeps_its_place_and_its_rewards_with_trl() -> None:
    rows = rows_of([Group("task", (ended(FIRST), ended(FIRST)), is_trained=False)], group_size=2, pad=9)
    assert rows.env_mask == [[0, 0], [0, 0]]
    assert rows.episode_reward == [1.0, 1.0]
    assert rows.trained() == []
