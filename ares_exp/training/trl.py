"""Training with TRL: `trainer=grpo`, and a `rollout_func` that runs episodes for TRL's GRPO trainer.

TRL runs in a thread, and episodes run on the event loop of the run. No responses are sampled during an optimizer step,
so that the trainer and the policy can share one module. A response is therefore sampled with the weights of the
checkpoint of its step.
"""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

from pydantic import Field, validate_call

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import ConfigError, UserError
from ares_exp.policies.policy import Policy, UpdatablePolicy
from ares_exp.runs.trainer import TrainedRun
from ares_exp.training.checkpoints import Checkpoint, Checkpoints
from ares_exp.training.curriculum import Curriculum, Weighting, ZeroStdGroups
from ares_exp.training.driver import DrivenEpisode, EpisodeDriver
from ares_exp.training.logprobs import largest_gap
from ares_exp.training.rounds import Group, Rounds, TrainingRecord
from ares_exp.training.sequences import TrainingSequence, sequences_of

STOP_LIMIT_SEC = 50.0
"""Time limit, in seconds, for an interrupted trainer to finish its current step."""

T = TypeVar("T")


@runtime_checkable
class InMemory(Protocol):
    """A policy whose module a trainer can change between responses."""

    async def in_memory(self) -> tuple[Any, Any]:
        """Returns the module and its tokenizer.

        After changing the module, call `UpdatablePolicy.update` without weights.
        """
        ...


@dataclass(frozen=True)
class TrainedRow:
    """A row of TRL as a single sequence of prompt and completion, for `largest_gap`."""

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]


@dataclass
class Rows:
    """Rows for TRL, one per attempt, with counts.

    TRL accepts one row per attempt. If an attempt has several rows, the row with the most trained tokens is used.

    Attributes:
        prompt_ids, completion_ids, logprobs, env_mask, episode_reward: Columns that a `rollout_func` returns. An
            attempt that cannot be trained on has a row of one token with mask 0. Its reward is `None`, which excludes
            it from the baseline.
        left_out: Number of unused rows of these attempts.
        forked: Number of rows that were started because the history was rewritten, including unused rows.
    """

    prompt_ids: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    env_mask: list[list[int]] = field(default_factory=list)
    episode_reward: list[float | None] = field(default_factory=list)
    left_out: int = 0
    forked: int = 0

    def add(self, row: TrainingSequence, *, is_trained: bool) -> None:
        """Adds the row of an attempt."""
        self.prompt_ids.append([*row.prompt_ids])
        self.completion_ids.append([*row.response_ids])
        self.logprobs.append([*row.response_logprobs])
        self.env_mask.append([*row.response_mask] if is_trained else [0] * len(row.response_ids))
        self.episode_reward.append(row.reward)

    def add_nothing(self, *, pad: int) -> None:
        """Adds the row of an attempt that cannot be trained on."""
        self.prompt_ids.append([pad])
        self.completion_ids.append([pad])
        self.logprobs.append([0.0])
        self.env_mask.append([0])
        self.episode_reward.append(None)

    def trained(self) -> list[TrainedRow]:
        """Returns the rows that have trained tokens, built from the columns that TRL receives."""
        every = zip(self.prompt_ids, self.completion_ids, self.logprobs, self.env_mask, strict=True)
        return [
            TrainedRow([*prompt, *ids], [*[0] * len(prompt), *mask], [*[0.0] * len(prompt), *logprobs])
            for prompt, ids, logprobs, mask in every
            if any(mask)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns the columns as the result of a `rollout_func`."""
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "episode_reward")
        return {name: getattr(self, name) for name in names}


def rows_of(
    groups: Sequence[Group], *, group_size: int, pad: int, conversations: Sequence[str] = (MAIN_CONVERSATION,)
) -> Rows:
    """Creates the rows of groups, in order, with `group_size` rows per group.

    Raises:
        UntrainableError: A response has no ids or log-probabilities, or its sampling was altered.
    """
    rows = Rows()
    for group in groups:
        for episode in group.episodes:
            _add_episode(rows, episode, is_trained=group.is_trained, pad=pad, conversations=conversations)
        for _ in range(group_size - len(group.episodes)):
            rows.add_nothing(pad=pad)
    return rows


def _add_episode(
    rows: Rows, episode: DrivenEpisode, *, is_trained: bool, pad: int, conversations: Sequence[str]
) -> None:
    trajectory = episode.trajectory
    if episode.reward is None or trajectory is None or not any(step.action for step in trajectory.steps):
        rows.add_nothing(pad=pad)
        return
    made = sequences_of(trajectory, conversations=conversations).rows
    rows.left_out += len(made) - 1
    rows.forked += sum(row.made == "forked" for row in made)
    rows.add(max(made, key=lambda row: row.trained_tokens), is_trained=is_trained)


class RolloutFunc:
    """A `rollout_func` of TRL's GRPO trainer that runs the episodes of a run, on the run's event loop.

    To use your own trainer, call its `train` in a thread:

    ```
    async with ares_exp.driven([...], policy=TransformersPolicy.of(model, tokenizer)) as driver:
        rollouts = RolloutFunc(Rounds(driver, record, Curriculum(tasks)))
        trainer = GRPOTrainer(model, reward_funcs=episode_reward, rollout_func=rollouts, …)
        await asyncio.to_thread(trainer.train)
    ```

    The curriculum chooses the tasks. The prompts of the data set only determine the number of groups.

    Attributes:
        last: Rows of the last call.
        groups: Groups of the last call.
    """

    def __init__(self, rounds: Rounds, *, conversations: Sequence[str] = (MAIN_CONVERSATION,)) -> None:
        """Stores the arguments. Must be called on the event loop of the run."""
        self.last = Rows()
        self.groups: Sequence[Group] = ()
        self._rounds = rounds
        self._conversations = conversations
        self._loop = asyncio.get_running_loop()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Runs one group for each `num_generations` prompts, and returns the rows. Blocking.

        Raises:
            ConfigError: The number of prompts is not a multiple of the group size.
        """
        size = self._rounds.group_size
        if len(prompts) % size:
            raise ConfigError(f"Expected groups of {size} prompts (`num_generations`), got {len(prompts)} prompts.")
        running = self._rounds.execute(trainer.state.global_step, len(prompts) // size)
        self.groups = asyncio.run_coroutine_threadsafe(running, self._loop).result()
        pad = trainer.processing_class.pad_token_id
        self.last = rows_of(self.groups, group_size=size, pad=pad, conversations=self._conversations)
        return self.last.to_dict()


def episode_reward(episode_reward: list[float | None], **_: Any) -> list[float | None]:
    """Returns the rewards of the episodes unchanged, as a reward function for TRL."""
    return episode_reward


class Grpo:
    """Trains the policy with GRPO from TRL, in this process."""

    @validate_call
    def __init__(
        self,
        *,
        steps: Annotated[int, Field(ge=1)] = 100,
        groups_per_step: Annotated[int, Field(ge=1)] = 4,
        group_size: Annotated[int, Field(ge=2)] = 8,
        batch_size: Annotated[int, Field(ge=1)] = 8,
        learning_rate: Annotated[float, Field(gt=0)] = 1e-6,
        conversations: Annotated[list[str], Field(min_length=1)] | None = None,
        curriculum: Weighting = "uniform",
        curriculum_least: Annotated[float, Field(gt=0)] = 0.05,
        curriculum_decay: Annotated[float, Field(gt=0, le=1)] = 0.9,
        pass_threshold: float = 1.0,
        zero_std_groups: ZeroStdGroups = "keep",
        max_refills: Annotated[int, Field(ge=1)] = 3,
        heldout: list[str] | None = None,
        eval_every: Annotated[int, Field(ge=1)] = 10,
        eval_attempts: Annotated[int, Field(ge=1)] = 4,
        checkpoint_every: Annotated[int, Field(ge=1)] = 10,
        keep_checkpoints: Annotated[int, Field(ge=1)] = 2,
        logprob_tolerance: Annotated[float, Field(gt=0)] | None = 1e-4,
        trl: dict[str, Any] | None = None,
    ) -> None:
        """Validates the arguments.

        Args:
            steps: Number of optimizer steps. A resumed training may use a larger number.
            groups_per_step: Number of groups of attempts per optimizer step.
            group_size: Number of attempts in a group, which are compared with each other.
            batch_size: Rows per forward pass; must divide the number of rows of a step.
            learning_rate: Learning rate of AdamW.
            conversations: Names or patterns of the conversations to train on. `None` selects only the agent's main
                conversation, without sub-agents and background requests.
            curriculum: Weight with which a task with the pass rate p is drawn: `uniform` (equal for all tasks),
                `learnability` (p · (1 - p)) or `difficulty` (1 - p).
            curriculum_least: Minimum weight of a task.
            curriculum_decay: Factor by which each new group reduces the weight of earlier attempts at the same task.
            pass_threshold: Minimum reward of an attempt that passes.
            zero_std_groups: Treatment of groups whose attempts all have the same reward: `keep` trains on them, `drop`
                does not, and `refill` runs other groups instead.
            max_refills: Maximum number of refills per step. Groups that are still missing are not trained on.
            heldout: Names or patterns of tasks that are evaluated but never trained on.
            eval_every: Optimizer steps between two evaluations. Also evaluates before the first and after the last
                step.
            eval_attempts: Number of attempts at each held-out task.
            checkpoint_every: Optimizer steps between two checkpoints. Also saves one after the last step.
            keep_checkpoints: Number of newest checkpoints to keep.
            logprob_tolerance: Maximum difference between the log-probability of a token at sampling and its recomputed
                value. Larger differences cause a warning. `None` disables the check and saves a forward pass per step.
            trl: Further arguments of TRL's `GRPOConfig`, such as `{beta: 0.04, loss_type: grpo}`.

        Raises:
            ConfigError: `batch_size` does not divide the rows of a step, or `trl` sets an argument that other keys
                determine.
        """
        rows = groups_per_step * group_size
        if rows % batch_size:
            raise ConfigError(
                f"Expected `trainer.batch_size` to divide the rows of a step, {groups_per_step} groups of {group_size} "
                f"= {rows}, got {batch_size}."
            )
        if fixed := sorted({*(trl or {})} & _OURS):
            raise ConfigError(f"Expected `trainer.trl` without what other keys decide, got {', '.join(fixed)}.")
        self.steps = steps
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.conversations = conversations or [MAIN_CONVERSATION]
        self.curriculum = curriculum
        self.curriculum_least = curriculum_least
        self.curriculum_decay = curriculum_decay
        self.pass_threshold = pass_threshold
        self.zero_std_groups = zero_std_groups
        self.max_refills = max_refills
        self.heldout = heldout or []
        self.eval_every = eval_every
        self.eval_attempts = eval_attempts
        self.checkpoint_every = checkpoint_every
        self.keep_checkpoints = keep_checkpoints
        self.logprob_tolerance = logprob_tolerance
        self.trl = trl or {}

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """Checks that training is possible with this policy and these tasks.

        Raises:
            ConfigError: A package is missing, the model of the policy is not in this process, a pattern in `heldout`
                matches no task, or all tasks are held out.
        """
        if lacking := [name for name in ("torch", "trl", "datasets", "accelerate") if find_spec(name) is None]:
            raise ConfigError(f"trainer=grpo needs {', '.join(lacking)}: `pip install 'ares-exp[train]'`.")
        if not (isinstance(policy, InMemory) and isinstance(policy, UpdatablePolicy)):
            raise ConfigError(
                f"Expected a policy whose model is in this process, got {type(policy).__name__}: "
                "`policy=transformers policy.model=…`."
            )
        for pattern in self.heldout:
            if not any(fnmatchcase(name, pattern) for name in task_names):
                raise ConfigError(f"`trainer.heldout`: no task of the run is called {pattern!r}.")
        Curriculum(self.split(task_names)[0])

    def split(self, task_names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the tasks to train on, and the held-out tasks."""
        heldout = [name for name in task_names if any(fnmatchcase(name, pattern) for pattern in self.heldout)]
        return [name for name in task_names if name not in heldout], heldout

    async def train(self, run: TrainedRun) -> None:
        """Trains until `steps` optimizer steps are reached. Starts from the newest checkpoint if one exists."""
        checkpoints = Checkpoints(run.run_dir.checkpoints, keep=self.keep_checkpoints)
        found = await asyncio.to_thread(checkpoints.found)
        record = await asyncio.to_thread(TrainingRecord, run.run_dir.training)
        training = _Training(self, run, checkpoints, found[-1] if found else None, record)
        if training.started_at < self.steps:
            await training.run_trl()


_OURS = {
    *("output_dir", "max_steps", "num_train_epochs", "num_generations", "per_device_train_batch_size", "report_to"),
    *("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "learning_rate", "seed"),
    *("save_strategy", "save_steps", "save_total_limit", "num_iterations", "temperature", "use_vllm", "logging_steps"),
}
"""Arguments of `GRPOConfig` that other options determine, or that must keep their values for on-policy training."""


_SAYS_NOTHING = ("epoch", "num_tokens", "rewards/episode_reward/mean", "rewards/episode_reward/std")
"""Metrics of TRL that describe its data set, which only determines the number of groups, or that TRL logs twice."""


class _Interrupted(Exception):
    """The run was interrupted. Raised in the trainer's thread to end it."""


class _Training:
    """One session of a training.

    Attributes:
        started_at: Number of optimizer steps of earlier sessions.
    """

    def __init__(
        self,
        options: Grpo,
        run: TrainedRun,
        checkpoints: Checkpoints,
        checkpoint: Checkpoint | None,
        record: TrainingRecord,
    ) -> None:
        state = checkpoint.state() if checkpoint is not None else {}
        self.started_at = checkpoint.step if checkpoint is not None else 0
        self._options = options
        self._run = run
        self._checkpoints = checkpoints
        self._checkpoint = checkpoint
        self._record = record
        self._session = len(record.find("session"))
        self._version = str(state.get("version", self._named(0)))
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        tasks, self._heldout = options.split(run.task_names)
        self._curriculum = Curriculum(
            tasks,
            weighting=options.curriculum,
            least=options.curriculum_least,
            decay=options.curriculum_decay,
            threshold=options.pass_threshold,
            seed=run.seed,
        )
        self._curriculum.restore(state.get("curriculum", {}))
        self._numbers: dict[str, float] = {}

    async def run_trl(self) -> None:
        """Runs TRL's trainer in a thread. After an interrupt, waits up to `STOP_LIMIT_SEC` for the current step."""
        policy: Any = self._run.policy
        model, tokenizer = await policy.in_memory()
        await policy.update(self._version)
        self._record.append("session", started_at=self.started_at, version=self._version)
        async with EpisodeDriver(self._run, version=self._version) as driver:
            self._rounds = Rounds(
                driver,
                self._record,
                self._curriculum,
                group_size=self._options.group_size,
                zero_std_groups=self._options.zero_std_groups,
                max_refills=self._options.max_refills,
            )
            self._rollouts = RolloutFunc(self._rounds, conversations=self._options.conversations)
            training = _in_thread(lambda: self._train(model, tokenizer))
            try:
                await asyncio.shield(training)
            except asyncio.CancelledError:
                self._stopped.set()
                await driver.close()
                await asyncio.wait({training}, timeout=STOP_LIMIT_SEC)
                raise

    def _train(self, model: Any, tokenizer: Any) -> None:
        """Runs TRL's trainer. Called in a separate thread."""
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from datasets import Dataset
        from transformers import PrinterCallback
        from transformers.utils import logging

        logging.disable_progress_bar()  # the run shows its own progress
        warnings.filterwarnings("ignore", ".*is deprecated and will be removed in v6", FutureWarning)

        groups = Dataset.from_list([{"prompt": f"group {n}"} for n in range(self._options.groups_per_step)])
        trainer = _trainer_class()(
            model=model,
            reward_funcs=episode_reward,
            args=self._arguments(model),
            train_dataset=groups,
            processing_class=tokenizer,
            rollout_func=self._execute,
            callbacks=[_callback_class()(self._after_step, self._logged)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.checkpoint = lambda step: self._checkpoints.appearing(step, self._state())
        if self._checkpoint is None:
            self._evaluate(0)
        trainer.train(resume_from_checkpoint=str(self._checkpoint.path) if self._checkpoint is not None else None)

    def _arguments(self, model: Any) -> Any:
        import torch
        from trl import GRPOConfig

        options = self._options
        rows = options.groups_per_step * options.group_size
        ours = {
            "output_dir": str(self._checkpoints.folder),
            "max_steps": options.steps,
            "num_generations": options.group_size,
            "per_device_train_batch_size": options.batch_size,
            "gradient_accumulation_steps": rows // options.batch_size,
            "learning_rate": options.learning_rate,
            "seed": self._run.seed,
            "save_strategy": "steps",
            "save_steps": options.checkpoint_every,
            "save_total_limit": None,
            "logging_steps": 1,
            "report_to": [],
        }
        defaults = {
            "use_cpu": model.device.type == "cpu",
            "bf16": model.dtype == torch.bfloat16,
            "gradient_checkpointing": False,
            "lr_scheduler_type": "constant",
            "disable_tqdm": True,
            "log_level": "error",
            "dataloader_pin_memory": model.device.type == "cuda",
        }
        try:
            return GRPOConfig(**{**defaults, **options.trl, **ours})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`trainer`: TRL refuses these arguments: {error}") from error

    def _execute(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Runs a round, as the `rollout_func`. Stores its metrics, which are logged at the end of the step."""
        self._refuse_stopped()
        try:
            rows = self._rollouts(prompts, trainer)
        except UserError:
            self._refuse_stopped()
            raise
        self._refuse_stopped()
        last, staleness = self._rollouts.last, self._rounds.driver.staleness
        trained = last.trained()
        self._numbers = {
            "train/episodes": sum(len(group.episodes) for group in self._rollouts.groups),
            "train/without_reward": sum(reward is None for reward in last.episode_reward),
            "train/groups_left_out": sum(not group.is_trained for group in self._rollouts.groups),
            "train/rows_forked": last.forked,
            "train/rows_left_out": last.left_out,
            "train/tokens": sum(sum(row.mask) for row in trained),
            "train/staleness_mean": staleness.mean,
            "train/staleness_max": staleness.most,
        }
        if self._options.logprob_tolerance is not None and trained:
            self._numbers["train/logprob_gap"] = self._gap(trainer, trained, self._options.logprob_tolerance)
        return rows

    def _gap(self, trainer: Any, rows: Sequence[TrainedRow], tolerance: float) -> float:
        model, pad = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class.pad_token_id
        was_training = model.training
        model.eval()
        try:
            gap = largest_gap(model, rows, pad=pad, batch_size=self._options.batch_size)
        finally:
            model.train(was_training)
        if gap > tolerance:
            self._run.warn(
                f"The log-probabilities of sampled tokens differ by up to {gap:.2g} from what the same weights give "
                f"them now, more than trainer.logprob_tolerance={tolerance:g}: the step is not quite on-policy."
            )
        return gap

    def _after_step(self, step: int) -> None:
        """Updates the version of the policy's weights, and evaluates if an evaluation is due."""
        self._refuse_stopped()
        self._version = self._named(step)
        self._on_loop(self._rounds.driver.update(self._version))
        if step % self._options.eval_every == 0 or step == self._options.steps:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        if self._heldout:
            means = self._on_loop(self._rounds.evaluate(step, self._heldout, self._options.eval_attempts))
            self._refuse_stopped()
            self._record.append("evaluated", step=step, version=self._version, **means)
            self._log(means, step)

    def _logged(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Records and logs the metrics of TRL, together with the metrics of the round, at the end of a step."""
        ours = {
            f"train/{name}": value
            for name, value in numbers.items()
            if isinstance(value, int | float) and name not in _SAYS_NOTHING
        }
        values = {**ours, **self._numbers}
        self._record.append("step", step=step, version=self._version, **values)
        self._log(values, step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._loop.call_soon_threadsafe(lambda: self._run.log(values, step=step))

    def _state(self) -> dict[str, Any]:
        return {"version": self._version, "curriculum": self._curriculum.state()}

    def _named(self, step: int) -> str:
        """Names the weights after a step. The name has the session's number, because a resumed step differs."""
        return str(step) if self._session == 0 else f"{step}.{self._session}"

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _refuse_stopped(self) -> None:
        if self._stopped.is_set():
            raise _Interrupted


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Calls a function in a daemon thread, which does not keep the process alive."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="trainer", daemon=True).start()
    future = asyncio.wrap_future(done)
    future.add_done_callback(lambda one: one.cancelled() or one.exception())  # the caller may have stopped waiting
    return future


def _trainer_class() -> type[Any]:
    """Returns a subclass of TRL's trainer that writes checkpoints atomically."""
    from transformers import Trainer
    from trl import GRPOTrainer

    class CheckpointingTrainer(GRPOTrainer):  # type: ignore[misc]
        checkpoint: Callable[[int], Any]

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            place = self.args.output_dir
            with self.checkpoint(self.state.global_step) as staging:
                self.args.output_dir = str(staging)
                try:
                    Trainer._save_checkpoint(self, model, trial)  # without TRL's model card
                finally:
                    self.args.output_dir = place

    return CheckpointingTrainer


def _callback_class() -> type[Any]:
    from transformers import TrainerCallback

    class Told(TrainerCallback):  # type: ignore[misc]
        """Forwards the end of each step and the logged metrics."""

        def __init__(self, after_step: Callable[[int], None], logged: Callable[[int, Mapping[str, Any]], None]) -> None:
            self._after_step = after_step
            self._logged = logged

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._after_step(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "train_runtime" not in logs:
                self._logged(state.global_step, logs)

    return Told


def last_checkpoint(run_dir: Path) -> Path | None:
    """Returns the folder of the newest checkpoint of a training, for `policy.model=…`; `None` without a checkpoint."""
    from ares_exp.records.run_dir import RunDir

    found = Checkpoints(RunDir(run_dir).checkpoints, keep=1).found()
    return found[-1].path if found else None
