from __future__ import annotations

import math
from pathlib import Path

from ares_exp.answer_log import Exchange, LoggedEpisode
from ares_exp.environments.time_step import TimeStep
from ares_exp.episode_plan import plan_episodes
from ares_exp.errors import AgentError
from ares_exp.llms.response import LLMResponse, TextData, Usage
from ares_exp.playing import Playing
from ares_exp.recorded_results import read_results
from ares_exp.results import Outcome
from ares_exp.run_dir import RunDir
from ares_exp.run_summary import RunSummary

PLANNED = plan_episodes(["a"], attempts=1, seed=0)[0]


def test_whatever_a_component_does_the_row_can_be_read_back(tmp_path: Path) -> None:
    playing, run_dir = Playing(PLANNED), RunDir(tmp_path)
    run_dir.append_episode(playing.result(AgentError("x" * 5_000_000)).to_dict())
    playing.tally.last = TimeStep("LAST", math.nan, 0.0, None)
    run_dir.append_episode(playing.result(None).to_dict())
    endless, no_number = read_results(run_dir.episodes).results
    assert endless.error is not None
    assert endless.error.message.endswith("… (5,000,000 characters)")
    assert (no_number.outcome, no_number.reward) == (Outcome.ERRORED, None)


def test_what_a_snapshot_holds_is_paid_once_though_the_episode_never_asked() -> None:
    answer = LLMResponse(data=[TextData(content="hi")], cost=0.5, usage=Usage(prompt_tokens=10, generated_tokens=1))
    first = Playing(PLANNED)
    first.tally.add(answer)
    cut_short = first.result(AgentError("killed"))
    log = LoggedEpisode(PLANNED.episode_id, *PLANNED.slot, 0, 7, 0.0, exchanges=[Exchange({}, answer)])
    playing = Playing(PLANNED.going_on(log, retry=1))
    playing.from_snapshot = 1
    playing.tally.add(answer)
    ended = playing.result(AgentError("no container"))
    assert RunSummary(planned=1, results=(cut_short, ended)).paid()["cost"] == 0.5
