"""Trainings of a tiny model on a CPU, with their curves: rewards rise from chance to what can be reached.

Run by hand, with matplotlib: `python -m tests.benchmarks.bench_training FOLDER [PICTURE [SEEDS]]`. Each seed has a
model of its own. Runs what is not in FOLDER yet, with so many seeds (3): a training, and ordinary runs of the model
before and after it. Prints a table, and draws the curves (docs/pictures/training.png).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ares_exp.training.trl import last_checkpoint

COMMON = ("agent=tools", "policy=transformers", "policy.max_output_tokens=1")
ATTEMPTS = 100
"""Episodes of the model before and after."""


@dataclass(frozen=True)
class Example:
    """A training, run with several seeds.

    Attributes:
        name: For people.
        tasks: What is run, in which `{toy}` is the folder of the toys.
        trainer: How it learns.
    """

    name: str
    tasks: tuple[str, ...]
    trainer: tuple[str, ...]


EXAMPLES = (
    Example(
        "one token",
        ("env=harbor", "env.tasks=[write-greeting]", "limits.steps=1"),
        ("trainer.steps=20", "trainer.groups_per_step=2", "trainer.learning_rate=0.02"),
    ),
    Example(
        "two turns",
        ("env=harbor", "env.path={toy}/tasks", "limits.steps=2"),
        (
            *("trainer.steps=40", "trainer.groups_per_step=2", "trainer.group_size=16", "trainer.batch_size=32"),
            *("trainer.learning_rate=0.015", "trainer.trl={beta: 0.2}"),
        ),
    ),
)


@dataclass(frozen=True)
class Curve:
    """What became of one training."""

    rewards: list[float]
    start: list[float]
    end: list[float]
    gap: float
    step_sec: float


def execute(folder: Path, example: Example, seed: int) -> Curve:
    """Trains, and runs the model before and after."""
    toy, name = f"toy-{seed}", f"{example.name.replace(' ', '-')}-{seed}"
    if not (folder / toy).exists():
        subprocess.run([sys.executable, "-m", "ares_exp.training.toy", toy, str(seed)], cwd=folder, check=True)
    common = [*COMMON, *(one.format(toy=toy) for one in example.tasks)]
    model = f"policy.model={toy}/model"
    run = run_of(folder, name, "train", *common, model, *example.trainer, "tracker=jsonl", f"seed={seed}")
    lines = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    ordinary = [*common, f"attempts={ATTEMPTS}", "tracker=none", f"seed={100 + seed}"]
    trained = f"policy.model={last_checkpoint(run.absolute())}"
    return Curve(
        [step["train/reward"] for step in steps.values()],
        rewards_of(run_of(folder, f"{name}-start", *ordinary, model)),
        rewards_of(run_of(folder, f"{name}-end", *ordinary, trained)),
        max(step["train/logprob_gap"] for step in steps.values()),
        statistics.median(step["train/step_time"] for step in steps.values()),
    )


def run_of(folder: Path, name: str, *words: str) -> Path:
    """Runs a run, unless that was done before; returns its directory."""
    if not (folder / name / "summary.json").exists():
        command = [sys.executable, "-m", "ares_exp", *words, f"hydra.run.dir={name}"]
        subprocess.run(command, cwd=folder, check=True)
    return folder / name


def rewards_of(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    return [row["reward"] for row in rows if row["reward"] is not None]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its 95 % interval (normal)."""
    mean, width = statistics.fmean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - width, mean + width


def draw(curves: dict[str, list[Curve]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(9, 3), sharey=True)
    for axis, (name, several) in zip(axes, curves.items(), strict=True):
        for seed, one in enumerate(several):
            axis.plot(range(1, len(one.rewards) + 1), one.rewards, label=f"seed {seed}", linewidth=1.3)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean reward of the step's episodes")
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main(folder: Path, picture: Path, seeds: Sequence[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[Curve]] = {}
    print("| example | seed | start (95 %) | end (95 %) | largest logprob gap | seconds a step |")
    print("|---|---|---|---|---|---|")
    for example in EXAMPLES:
        for seed in seeds:
            one = execute(folder, example, seed)
            curves.setdefault(example.name, []).append(one)
            start, end = ("{:.3f} [{:.3f}, {:.3f}]".format(*interval(values)) for values in (one.start, one.end))
            print(f"| {example.name} | {seed} | {start} | {end} | {one.gap:.1e} | {one.step_sec:.1f} |")
    draw(curves, picture)


if __name__ == "__main__":
    picture = Path(sys.argv[2] if len(sys.argv) > 2 else "docs/pictures/training.png")
    main(Path(sys.argv[1]), picture, range(int(sys.argv[3]) if len(sys.argv) > 3 else 3))
