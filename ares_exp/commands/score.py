"""The command `score`: scores the finished episodes of a run again, without requests to the policy.

Each scorer has a file `scores/NAME.jsonl` in the run directory. Each call of the command appends a line with the config
of the scorer, and then one line with the scores of each episode. `read_results` adds these scores to the rewards of the
episodes, so that all commands show them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ares_exp import __version__
from ares_exp.cancellation import finish, in_thread
from ares_exp.commands.cli.run_command import add_config_dir
from ares_exp.config.overrides import covers, key_set_by, parse_overrides
from ares_exp.config.schema import KEYS, validate
from ares_exp.containers.container import Container
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.scoring.scored_source import make_scoring_rules
from ares_exp.environments.scoring.scorer import ConfiguredScorer, ScoredEpisode
from ares_exp.environments.source import make_source
from ares_exp.errors import ConfigError, EpisodeError, SnapshotError, TrajectoryFormatError, UserError
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.recorded_results import added_rewards, read_lines, read_object, read_results, recorded_summary
from ares_exp.records.results import EnvironmentUsage, EpisodeResult, Outcome, final_results
from ares_exp.records.run_dir import SCORES_SUFFIX, RunDir, append_lines
from ares_exp.records.statistics.run_statistics import mean_scores
from ares_exp.records.terminal_text import count_of, first_of, one_line, print_warning, write
from ares_exp.reports.summary import format_estimate, render_summary
from ares_exp.runs.resume.recorded_run import RecordedRun, is_trusted, values_of
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.tasks.task_contract import Task
from ares_exp.trajectories.records import EpisodeTrajectory, deserialize_llm_response
from ares_exp.trajectories.stored_episodes import StoredEpisode, load

SCORED = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.VERIFIER_ERROR})
"""Outcomes of the episodes that can be scored again, because their agents finished."""
SETTABLE = ("scorer", "env.scorers", "concurrency")
SHOWN = 5
RENAME = "Use another name: `scorer.name=NAME`, or `env.scorers={NAME: {_target_: …}}`."
NO_CONTAINER = (
    "The container of the episode is gone, and no snapshot of its last step exists. Use `replay=RUN` with this scorer "
    "to run the recorded responses again, or take snapshots in the next run (`snapshot=every_step`)."
)

HELP = """\
Scores the finished episodes of RUN again, without requests to the policy. The new scores have the name of the scorer
and are shown next to the original rewards, which do not change. After an interruption, run the command again to
continue.
[arguments]
Examples:
  %(prog)s outputs/first scorer=judge scorer.policy.model=gpt-5-mini concurrency=8
  %(prog)s outputs/first 'env.scorers=[my_scorers.tidy]'

Exit codes: 0 all episodes are scored; 1 some are not; 2 the command line or the run is wrong; 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=run_path, metavar="RUN", help=f"a run directory; {MEANING}")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"as for a run: {', '.join(SETTABLE)}")
    add_config_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    from ares_exp.config.hydra_setup import compose_config  # loads Hydra, which is slow

    run_dir = RunDir(RecordedRun(arguments.run).path)
    if not is_trusted(run_dir.path):  # loads its tasks and executes its responses in a container
        raise ConfigError(
            f"Expected a run directory that only you can write to, got {run_dir.path}: it belongs to another "
            "user, or other users can write to it. Copy it, and score the copy."
        )
    config = compose_config(["tracker=none", *arguments.overrides], config_dirs=arguments.config_dir)
    for key in map(key_set_by, parse_overrides(arguments.overrides)):
        if not any(covers(known, key) for known in SETTABLE):
            raise ConfigError(
                f"Expected keys of {', '.join(f'`{one}`' for one in SETTABLE)}, got `{key}`. The agent and the policy "
                "of the run are not used. Set the model of a judge with `scorer.policy.model=…`."
            )
    validate({name: config[name] for name in KEYS})
    scorers = [replace(one, weight=0.0) for one in make_scoring_rules(config).scorers]
    if not scorers:
        raise ConfigError("No scorer is set. Use `scorer=judge`, or `env.scorers=[package.module.function]`.")
    with run_dir.owned(resume=True):
        scoring = _Scoring(run_dir, scorers)
        try:
            asyncio.run(scoring.run(config.concurrency))
        except KeyboardInterrupt:
            sys.stderr.write(f"interrupted: {scoring.progress}. Run the command again to continue.\n")
            return exit_codes.INTERRUPTED
    scoring.show()
    return exit_codes.INCOMPLETE if scoring.failures else exit_codes.COMPLETE


class _Scoring:
    """Scores the episodes of a run, each with the scorers from which it has no score yet.

    Attributes:
        failures: Error messages, and the episodes that could not be scored because of them.
    """

    def __init__(self, run_dir: RunDir, scorers: Sequence[ConfiguredScorer]) -> None:
        """Reads the records, and selects the episodes that need a score.

        Raises:
            ConfigError: A record is broken, the name of a scorer is in use, or no episode needs a score.
        """
        results, added = read_results(run_dir.episodes).results, added_rewards(run_dir)
        stored = {one.episode_id: one for one in load(run_dir.path, partial=True, skip_broken=True)}
        final = final_results(results)
        able = [row for row in final if row.outcome in SCORED and row.episode_id in stored]
        left_out = Counter(row.outcome.value for row in final if row.outcome not in SCORED)
        left_out["lost"] += len(stored.keys() - {row.episode_id for row in results})
        left_out["without a trajectory"] = len(final) - len(able) - sum(row.outcome not in SCORED for row in final)
        self._left_out = ", ".join(f"{count:,} {reason}" for reason, count in (+left_out).items())
        if not able:
            found = self._left_out or "no episodes"
            raise ConfigError(
                f"Expected finished episodes with trajectories in {run_dir.path}, found {found}. Use `collector=json` "
                "in a run to score it later."
            )
        own = {name for row in results for name in row.rewards.keys() - added.get(row.episode_id, {}).keys()}
        for one in scorers:
            _check_name(one, _file(run_dir, one.name), own)
        lacking = ((row, [one for one in scorers if not _has(added.get(row.episode_id, {}), one.name)]) for row in able)
        self._due = [(row, stored[row.episode_id], missing) for row, missing in lacking if missing]
        if not self._due:
            raise ConfigError(f"All finished episodes already have scores named `{scorers[0].name}`. {RENAME}")
        self._run_dir, self._scorers, self._tasks = run_dir, scorers, _tasks(run_dir)
        self._done, self._used = 0, EnvironmentUsage()
        self.failures: dict[str, list[str]] = {}

    @property
    def progress(self) -> str:
        return f"{self._done:,} of {count_of(len(self._due), 'episode')} done"

    async def run(self, concurrency: int) -> None:
        """Scores up to `concurrency` episodes at the same time. Raises `PreflightError` if a scorer is not ready."""
        due = iter(self._due)
        try:
            for one in self._scorers:
                await one.scorer.preflight()
                head = {"scorer": one.name, "config": one.config, "ares_exp_version": __version__}
                append_lines(_file(self._run_dir, one.name), head)
            await asyncio.gather(*(self._work(due) for _ in range(min(concurrency, len(self._due)))))
        finally:
            for one in self._scorers:
                await finish(one.scorer.close())

    def show(self) -> None:
        """Prints the summary of the run, the mean of each new score, and the episodes that were not scored."""
        run_dir, lines = self._run_dir, []
        if (summary := recorded_summary(run_dir)) is not None:
            render_summary(summary, run_dir=run_dir.path, stream=sys.stdout)
        for name, mean in mean_scores(read_results(run_dir.episodes).results, added_rewards(run_dir)):
            if any(_has([name], one.name) for one in self._scorers):
                lines.append(f"{name}: {format_estimate(mean)} over {mean.attempts} scored")
        if self._used.tokens:
            cost = f", ${self._used.cost:,.4f}" if self._used.cost else ""
            lines.append(f"Spent on scoring: {self._used.tokens:,} tokens{cost}")
        if self._left_out:
            lines.append(f"Left out: {self._left_out}")
        if (run_dir.path / "wandb").is_dir():
            lines.append(f"W&B: upload the scores with `ares-exp wandb sync {run_dir.path}`")
        write(sys.stdout, "".join(f"{line}\n" for line in lines))
        for why, episodes in self.failures.items():
            write(sys.stderr, f"not scored: {first_of(episodes, SHOWN)}: {one_line(why, 1_000)}\n")

    async def _work(self, due: Iterator[tuple[EpisodeResult, StoredEpisode, Sequence[ConfiguredScorer]]]) -> None:
        for row, stored, scorers in due:
            try:
                episode = self._episode(row, await in_thread(stored.load))
                async with self._container(episode.trajectory, scorers) as container:
                    for one in scorers:
                        await self._score(one, episode, container)
            except (EpisodeError, SnapshotError, TrajectoryFormatError) as error:  # from the record or the container
                self._failed(row, str(error))
            self._done += 1
            if self._done % max(len(self._due) // 10, 2) == 0:
                write(sys.stderr, f"{self.progress}\n")

    async def _score(self, scorer: ConfiguredScorer, episode: ScoredEpisode, container: Container | None) -> None:
        """Calls a scorer, and appends its scores to its file. An error is stored in `failures`."""
        spent: list[EnvironmentUsage] = []
        try:
            score = await scorer.score(replace(episode, spend=spent.append), container)
        except EpisodeError as error:
            had_one = "container_image" in episode.trajectory.metadata
            is_missed = had_one and container is None and scorer.uses_container
            self._failed(episode, f"{str(error).rstrip('.')}. {NO_CONTAINER}" if is_missed else str(error))
        else:
            line = {
                "episode_id": episode.trajectory.episode_id,
                "rewards": dict(score.rewards),
                "usage": asdict(sum(spent, EnvironmentUsage())),
                "scored_at": time.time(),
            }
            await in_thread(lambda: append_lines(_file(self._run_dir, scorer.name), line))
        finally:
            self._used += sum(spent, EnvironmentUsage())

    def _failed(self, row: EpisodeResult | ScoredEpisode, why: str) -> None:
        self.failures.setdefault(why, []).append(f"{row.task_name} (attempt {row.attempt})")

    def _episode(self, row: EpisodeResult, trajectory: EpisodeTrajectory) -> ScoredEpisode:
        """Creates the object that scorers receive for an episode. The scorers of the run received the same data."""
        last = trajectory.unfinished_step
        if last is not None and last.action is not None:  # the agent finished, but the verifier failed
            trajectory = replace(trajectory, steps=(*trajectory.steps, last))
        files = self._run_dir.files / row.episode_id
        return ScoredEpisode(
            trajectory=trajectory,
            task=self._tasks.get(row.task_name),
            reward=trajectory.rewards.get("reward", row.reward),
            rewards=trajectory.rewards,
            seed=row.seed,
            attempt=row.attempt,
            output_dir=files if files.is_dir() else None,
        )

    @asynccontextmanager
    async def _container(
        self, trajectory: EpisodeTrajectory, scorers: Sequence[ConfiguredScorer]
    ) -> AsyncIterator[Container | None]:
        """Yields an episode's container in its final state; `None` if no scorer uses it, or if it cannot be restored.

        The container is restored from the snapshot before the last step. Then the agent executes the last response
        again, and the tests run, as in the original episode. Without this snapshot, the container cannot be restored.
        """
        step, last = len(trajectory.steps) - 2, trajectory.steps[-1].action if trajectory.steps else None
        snapshot = None
        if last is not None and any(one.uses_container for one in scorers):
            store = SnapshotStore(self._run_dir.snapshots)
            snapshot = await in_thread(lambda: store.nearest(trajectory.episode_id, step))
        if last is None or snapshot is None or snapshot.step_count != step:
            yield None
            return
        task = self._tasks.get(trajectory.task_name)
        async with await CodeEnvironment.load_from_state(snapshot, task=task, start=False) as environment:
            environment.hold_container()
            await environment.reset()
            await environment.step(deserialize_llm_response(last))
            yield environment.held_container


def _has(rewards: Iterable[str], name: str) -> bool:
    """Returns whether any reward comes from the scorer `name`: its name is `name` or starts with `name.`."""
    return name in {reward.partition(".")[0] for reward in rewards}


def _check_name(scorer: ConfiguredScorer, file: Path, own: Iterable[str]) -> None:
    """Raises `ConfigError` if the scorer's name belongs to another reward, or to a scorer with another config.

    Removes an incomplete last line from the scorer's file, or empties the file if it contains no scores.
    """
    if _has(own, scorer.name):
        raise ConfigError(f"The run already has rewards named `{scorer.name}` from its own scorers or tests. {RENAME}")
    if not file.exists():
        return
    lines: list[Any] = []
    whole_bytes, _ = read_lines(file, "scores", lines.append)
    has_scores = any("rewards" in line for line in lines)
    if has_scores and any(line.get("config", scorer.config) != scorer.config for line in lines):
        raise ConfigError(
            f"The run already has scores named `{scorer.name}` from a scorer with another config. {RENAME}"
        )
    os.truncate(file, whole_bytes if has_scores else 0)


def _tasks(run_dir: RunDir) -> Mapping[str, Task]:
    """Loads the tasks of a run, by name. Leaves out tasks that have changed since the run, with a warning.

    If the tasks cannot be loaded, returns no tasks, with a warning.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        source = make_source(OmegaConf.create(values_of(RecordedRun(run_dir.path))))
        source.load(lambda _: None)
        digests = read_object(run_dir.provenance).get("tasks")
        tasks = {one.name: one for one in source.tasks}
        changed = [name for name in tasks if not isinstance(digests, dict) or source.digest(name) != digests.get(name)]
        if changed:
            print_warning(
                f"These tasks have changed since the run, so scorers do not receive them: {', '.join(changed[:5])}"
            )
        return {name: one for name, one in tasks.items() if name not in changed}
    except (UserError, OSError, OmegaConfBaseException) as error:
        print_warning(
            "The tasks cannot be loaded, so scorers receive the first request of each episode instead of its task: "
            f"{error}"
        )
        return {}


def _file(run_dir: RunDir, name: str) -> Path:
    return run_dir.scores / f"{name}{SCORES_SUFFIX}"
