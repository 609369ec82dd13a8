"""Trainings of a tiny model on a CPU, with their curves: rewards rise from chance to what can be reached.

Run by hand, with matplotlib: `python -m tests.benchmarks.bench_training FOLDER [PICTURE [SEEDS]]`. Plays what
is not in FOLDER yet, with so many seeds (3), prints a table, and draws the curves (docs/pictures/training.png).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMMON = (
    "agent=tools",
    "policy=transformers",
    "policy.max_output_tokens=1",
    "tracker=jsonl",
    "trainer.learning_rate=0.02",
)


@dataclass(frozen=True)
class Example:
    """A training, played with several seeds."""

    name: str
    overrides: tuple[str, ...]


EXAMPLES = (
    Example(
        "one token",
        (
            "env=harbor_samples",
            "env.tasks=[write-greeting]",
            "step_limit=1",
            "trainer.steps=20",
            "trainer.groups_per_step=2",
        ),
    ),
    Example(
        "two turns",
        ("env=harbor", "env.path=toy/tasks", "step_limit=2", "trainer.steps=25", "trainer.batch_size=32"),
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


def play(folder: Path, example: Example, seed: int) -> Path:
    run = folder / f"{example.name.replace(' ', '-')}-{seed}"
    if not (run / "summary.json").exists():
        words = [*example.overrides, *COMMON, "policy.model=toy/model", f"seed={seed}", f"hydra.run.dir={run.name}"]
        subprocess.run([sys.executable, "-m", "ares_exp", "train", *words], cwd=folder, check=True)
    return run


def curve(run: Path) -> Curve:
    lines = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    rounds = [line for line in lines if line["kind"] == "round"]
    rows = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    reward = {(row["task_name"], row["attempt"]): row["reward"] for row in rows if row["reward"] is not None}
    first, last = ([reward[tuple(slot)] for slot in one["slots"]] for one in (rounds[0], rounds[-1]))
    return Curve(
        [step["train/reward"] for step in steps],
        first,
        last,
        max(step["train/logprob_gap"] for step in steps),
        statistics.median(step["train/step_time"] for step in steps),
    )


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
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main(folder: Path, picture: Path, seeds: Sequence[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "toy").exists():
        subprocess.run([sys.executable, "-m", "ares_exp.training.toy", "toy"], cwd=folder, check=True)
    curves: dict[str, list[Curve]] = {}
    print("| example | seed | start (95 %) | end (95 %) | largest logprob gap | seconds a step |")
    print("|---|---|---|---|---|---|")
    for example in EXAMPLES:
        for seed in seeds:
            one = curve(play(folder, example, seed))
            curves.setdefault(example.name, []).append(one)
            start, end = ("{:.2f} [{:.2f}, {:.2f}]".format(*interval(values)) for values in (one.start, one.end))
            print(f"| {example.name} | {seed} | {start} | {end} | {one.gap:.1e} | {one.step_sec:.1f} |")
    draw(curves, picture)


if __name__ == "__main__":
    picture = Path(sys.argv[2] if len(sys.argv) > 2 else "docs/pictures/training.png")
    main(Path(sys.argv[1]), picture, range(int(sys.argv[3]) if len(sys.argv) > 3 else 3))
