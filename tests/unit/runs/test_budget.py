"""Spending, and the messages when a budget is used up."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.targets import instantiate_group
from ares_exp.errors import ConfigError
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.records.results import EnvironmentUsage, EpisodeResult, ErrorInfo, Outcome, Replayed
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.budget import Budget, BudgetMeter, Limits, paid


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def result(episode_id: str = "e", outcome: str = "completed", *, at: float = 10.0, **more: Any) -> EpisodeResult:
    reward = 1.0 if outcome in ("completed", "truncated") else None
    values = {"task_name": "t", "attempt": 0, "seed": 0, "reward": reward, "started_at": at - 1, "finished_at": at}
    return EpisodeResult(episode_id=episode_id, outcome=Outcome(outcome), **{**values, **more})


def respond(tokens: int, cost: float = 0.0) -> LLMResponse:
    return LLMResponse.from_text("a", usage=Usage(tokens - 1, 1), cost=cost)


def job(sweep: Path, name: str, *results: EpisodeResult) -> Path:
    folder = sweep / name
    folder.mkdir(parents=True, exist_ok=True)
    RunDir(folder).config.write_text("seed: 0\n")
    lines = [json.dumps(one.to_dict()) for one in results]
    RunDir(folder).episodes.write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_environment_usage_counts_once() -> None:
    meter = BudgetMeter(Budget(cost=1.0), earlier=[result("b", environment_usage=EnvironmentUsage(50, 0, 0.25))])
    meter.add_response("a", respond(10, 0.125))
    meter.add_environment("a", None)
    meter.add_environment("a", EnvironmentUsage(20, 2, 0.25))
    meter.add_environment("a", EnvironmentUsage(30, 3, 0.375))
    assert (meter.spent.cost, meter.spent.tokens) == (0.75, 93)
    assert meter.exhausted() is None
    used = EnvironmentUsage(40, 4, 0.625)
    meter.add(result("a", cost=0.125, prompt_tokens=9, generated_tokens=1, environment_usage=used))
    assert (meter.spent.cost, meter.spent.tokens) == (1.0, 104)
    assert meter.exhausted() is not None


def test_cost_of_responses_counts_once() -> None:
    meter = BudgetMeter(Budget(cost=1.0))
    meter.add_response("a", respond(10, 0.4))
    meter.add_response("b", respond(10, 0.4))
    assert meter.exhausted() is None
    meter.add(result("a", cost=0.4, prompt_tokens=9, generated_tokens=1))
    assert (meter.spent.cost, meter.spent.tokens) == (0.8, 20)
    assert meter.exhausted() is None
    meter.add_response("b", respond(10, 0.25))
    assert meter.exhausted() == (
        "The run's budget is used up: 1.05 US dollars, budget.cost=1. No more episodes start, and running "
        "episodes are cancelled. Resume with a larger budget, such as budget.cost=2."
    )


def test_result_without_reported_responses_counts_completely() -> None:
    meter = BudgetMeter(Budget(tokens=30))
    meter.add(result(prompt_tokens=20, generated_tokens=9))
    assert meter.exhausted() is None
    meter.add(result("f", prompt_tokens=1))
    said = str(meter.exhausted())
    assert "30 tokens, budget.tokens=30." in said
    assert "budget.tokens=60" in said


def test_response_missing_in_the_result_counts() -> None:
    meter = BudgetMeter(Budget())
    meter.add_response("a", respond(10, 0.5))
    meter.add(result("a", "policy_error", error=ErrorInfo("RefusalError", "no")))
    assert (meter.spent.cost, meter.spent.tokens) == (0.5, 10)


def test_replayed_responses_are_not_paid_twice() -> None:
    first = result("a", "lost", prompt_tokens=100, generated_tokens=10, cost=2.0)
    taken = Replayed("a", steps=3, prompt_tokens=100, generated_tokens=10, cost=2.0)
    meter = BudgetMeter(Budget(), earlier=[first])
    assert (meter.spent.tokens, meter.spent.cost) == (110, 2.0)
    meter.add_response("b", respond(40, 0.5))
    meter.add(result("b", prompt_tokens=130, generated_tokens=20, cost=2.5, replayed=taken))
    assert (meter.spent.tokens, meter.spent.cost) == (150, 2.5)
    assert paid(result("c", prompt_tokens=1, replayed=taken)).tokens == 0, "never negative"


def test_wall_time_includes_all_sessions() -> None:
    clock = Clock()
    meter = BudgetMeter(Budget(wall_sec=100), earlier_wall_sec=70.0, clock=clock)
    clock.now += 29.5
    assert meter.exhausted() is None
    clock.now += 1.0
    said = str(meter.exhausted())
    assert "100.5 seconds, budget.wall_sec=100" in said
    assert "budget.wall_sec=200" in said


def test_proposed_budget_exceeds_the_spent_amount() -> None:
    said = str(BudgetMeter(Budget(cost=5.0), earlier=[result(cost=30.0)]).exhausted())
    assert said.endswith("such as budget.cost=40.")


FAULT, AGENT, SCORED, SILENT = "container_error", "agent_error", "completed", "cancelled"


@pytest.mark.parametrize(
    ("outcomes", "length"),
    [
        ([FAULT, "verifier_error", "policy_error", "errored"], 4),
        ([FAULT, SCORED, FAULT, FAULT], 2),
        ([FAULT, FAULT, AGENT], 0),
        ([FAULT, "truncated", FAULT], 1),
        ([FAULT, SILENT, "lost", "abandoned", "closed", FAULT], 2),
    ],
)
def test_errors_in_a_row_are_counted(outcomes: list[str], length: int) -> None:
    meter = BudgetMeter(Budget(errors_in_a_row=max(length, 1)))
    for number, outcome in enumerate(outcomes):
        meter.add(result(str(number), outcome, at=100.0 + number))
    assert meter.spent.errors_in_a_row == length
    assert (meter.exhausted() is not None) == (length > 0)


@pytest.mark.parametrize("name", ["ContextOverflowError", "RefusalError"])
def test_model_error_resets_errors_in_a_row(name: str) -> None:
    meter = BudgetMeter(Budget(errors_in_a_row=2))
    meter.add(result("a", FAULT))
    meter.add(result("b", "policy_error", error=ErrorInfo(name, "x")))
    meter.add(result("c", FAULT))
    assert meter.exhausted() is None
    meter.add(result("d", "policy_error", error=ErrorInfo("ServerError", "x")))
    said = str(meter.exhausted())
    assert "2 errors in a row, budget.errors_in_a_row=2" in said
    assert said.endswith("Resume with the same budget after you have fixed the cause of the errors.")


def test_sweep_budget_adds_its_jobs(tmp_path: Path) -> None:
    own = job(tmp_path, "0", result("own", cost=99.0))
    job(tmp_path, "1", result("a", cost=1.0, prompt_tokens=10), result("b", cost=1.0))
    (tmp_path / "2").mkdir()
    (tmp_path / "multirun.yaml").write_text("x")
    meter = BudgetMeter(Budget(cost=3.0, sweep=Limits(cost=4.0)), run_dir=own, sweep_dir=tmp_path)
    meter.add_response("e", respond(5, 1.5))
    assert meter.exhausted() is None, "nothing is read before `refresh`"
    meter.refresh()
    assert (meter.spent_by_sweep.cost, meter.spent_by_sweep.tokens) == (3.5, 15)
    assert meter.exhausted() is None
    job(tmp_path, "1", result("a", cost=1.0), result("b", cost=1.0), result("c", cost=0.5))
    meter.refresh()
    said = str(meter.exhausted())
    assert said.startswith("The sweep's budget is used up: 4 US dollars, budget.sweep.cost=4.")
    assert "budget.sweep.cost=8" in said


def test_invalid_cost_leaves_the_budget_unchanged() -> None:
    meter = BudgetMeter(Budget(cost=1.0))
    for cost in (float("nan"), -5.0, 2.0):
        meter.add_response("e", respond(5, cost))
    assert meter.spent.cost == 2.0
    assert meter.exhausted() is not None


def test_unchanged_job_is_not_read_again(tmp_path: Path) -> None:
    folder = job(tmp_path, "1", result("a", cost=1.0))
    meter = BudgetMeter(Budget(sweep=Limits(cost=9.0)), run_dir=tmp_path / "0", sweep_dir=tmp_path)
    meter.refresh()
    path = RunDir(folder).episodes
    stat = path.stat()
    path.write_bytes(b"x" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    meter.refresh()
    assert meter.spent_by_sweep.cost == 1.0
    path.write_text("no result\n")
    with pytest.raises(ConfigError, match="line 1"):
        meter.refresh()


def test_broken_jobs_keep_their_last_known_cost(tmp_path: Path) -> None:
    folders = [job(tmp_path, name, result("a", cost=1.0)) for name in ("1", "2", "lr=1/seed=3")]
    meter = BudgetMeter(Budget(sweep=Limits(cost=9.0)), run_dir=tmp_path / "0", sweep_dir=tmp_path)
    meter.refresh()
    assert meter.spent_by_sweep.cost == 3.0
    for name in ("0x", "1"):
        RunDir(job(tmp_path, name)).episodes.write_text("no result\n")
    for name in ("2", "lr=1/seed=3"):
        job(tmp_path, name, result("a", cost=1.0), result("b", cost=1.0))
    with pytest.raises(ConfigError) as raised:
        meter.refresh()
    assert meter.spent_by_sweep.cost == 1.0 + 2.0 + 2.0
    named = [str(RunDir(folder).episodes) in str(raised.value) for folder in (tmp_path / "0x", *folders)]
    assert named == [True, True, False, False]


def test_wall_time_of_jobs_counts_overlaps_once(tmp_path: Path) -> None:
    spans = [(10.0, 20.0), (15.0, 30.0), (16.0, 17.0), (1000.0, 1005.0)]
    rows = [result(str(n), started_at=start, at=0.0, finished_at=end) for n, (start, end) in enumerate(spans)]
    job(tmp_path, "1", *rows)
    job(tmp_path, "2", result("x", started_at=12.0, finished_at=14.0))
    clock = Clock()
    meter = BudgetMeter(Budget(sweep=Limits(wall_sec=30.0)), sweep_dir=tmp_path, clock=clock, earlier_wall_sec=1.0)
    meter.refresh()
    assert meter.spent_by_sweep.wall_sec == 20.0 + 5.0 + 2.0 + 1.0
    clock.now += 2.0
    assert meter.exhausted() is not None


def test_errors_in_a_row_count_across_jobs(tmp_path: Path) -> None:
    old = [result(f"o{n}", FAULT, at=50.0 + n) for n in range(5)]
    job(tmp_path, "1", *old, result("a", SCORED, at=100.0), result("b", FAULT, at=120.0))
    job(tmp_path, "2", result("c", FAULT, at=90.0), result("d", FAULT, at=130.0))
    budget = Budget(sweep=Limits(errors_in_a_row=3))
    meter = BudgetMeter(budget, run_dir=tmp_path / "0", sweep_dir=tmp_path, since=80.0)
    meter.refresh()
    assert meter.spent_by_sweep.errors_in_a_row == 2
    assert meter.exhausted() is None
    meter.add(result("e", FAULT, at=140.0))
    assert meter.exhausted() is not None
    assert meter.spent.errors_in_a_row == 1
    resumed = BudgetMeter(budget, run_dir=tmp_path / "0", sweep_dir=tmp_path, since=125.0)
    resumed.refresh()
    assert resumed.spent_by_sweep.errors_in_a_row == 1, "of this process only"


def composed(*overrides: str) -> Budget:
    return instantiate_group(compose_config(overrides), "budget")


def test_budget_is_read_from_the_command_line() -> None:
    assert composed() == Budget()
    made = composed("budget.cost=5", "budget.tokens=2000000", "budget.sweep.cost=50", "budget.sweep.errors_in_a_row=9")
    assert made == Budget(cost=5.0, tokens=2_000_000, sweep=Limits(cost=50.0, errors_in_a_row=9))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("budget.cost=0", "`budget.cost`: .*greater than 0"),
        ("budget.cost=lots", "`budget.cost`"),
        ("budget.wall_sec=inf", "`budget.wall_sec`: .*finite"),
        ("budget.sweep.tokens=-5", "`budget.sweep.tokens`: .*greater than 0"),
        ("+budget.sweep.coast=5", "`budget.sweep.coast`"),
        ("+budget.coast=5", "no argument `coast`.* Did you mean `cost`"),
    ],
)
def test_mistakes_are_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        composed(override)
