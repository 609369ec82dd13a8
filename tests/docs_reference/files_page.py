"""docs/reference/files.md: the files in a run directory and in a sweep folder, and the versions of the formats."""

from collections.abc import Mapping
from pathlib import Path

from ares_exp.policies import replay
from ares_exp.records.results import AgentFacts, EpisodeResult, ErrorInfo, Replayed, StageResult
from ares_exp.records.run_dir import RunDir
from ares_exp.records.statistics import run_statistics
from ares_exp.runs.sweeps import sweep_report
from ares_exp.snapshots import snapshot as snapshot_versions
from ares_exp.trajectories.files import episode_file as trajectory_versions
from tests.docs_reference.markdown import GENERATED, documented_fields, plain, table

NAMED: Mapping[str, str] = {
    "config": "The resolved config.",
    "provenance": "The git commit of the project and of the task set (with a flag for uncommitted changes), versions, "
    "platform, command line, chosen options, warnings, digests of the tasks, and the commits of tasks from git.",
    "episodes": "One line per episode, written when the episode ends ([fields](#fields-of-episodesjsonl)).",
    "summary": "Totals of outcomes, rewards, tokens and cost.",
    "results": "Totals, statistics with their intervals, and one row per task.",
    "sessions": "One line each time that the run was started, resumed or ended.",
    "responses": "`<episode_id>.jsonl`: requests and responses of an episode that is running or was interrupted, and "
    "its result. The file is deleted when the attempt has a result.",
    "trajectories": "`<episode_id>.json` (with `collector=json`): every step of an episode.",
    "files": "`<episode_id>/verifier/`: reward files and output of the task's tests. `<episode_id>/artifacts/`: "
    "artifacts with a `manifest.json`. For a task with several steps, both are in `steps/<name>/`.",
    "scores": "`<name>.jsonl`: the config of a scorer of `ares-exp score`, then one line per episode.",
    "snapshots": "`<episode_id>@<step>/snapshot.json`. The contents of files are shared in `objects/`.",
    "branch_point": "Only for branches: the snapshot from which the branches start, if the recorded run has none.",
    "replay": "Only for replays: the comparison of every step, differences, rewards, and determinism scores by task.",
    "metrics": "The metrics of `tracker=jsonl`.",
    "tensorboard": "The event files of `tracker=tensorboard`.",
    "service": "The state of `ares-exp serve`: `record.jsonl` with one line per submission, end and acknowledgement, "
    "and `<cursor>.json` for each episode that is not acknowledged.",
    "log": "The log, with tracebacks.",
    "status": "The state of a run in progress: waiting times of episodes and spending ([control](../control.md)).",
    "control": "Commands of `ares-exp ctl` that the run has not read yet.",
    "orders": "One line per command of `ares-exp ctl`: author, time, reason and outcome.",
}
"""Descriptions of the files of `RunDir`, by its attributes."""

OTHERS: Mapping[str, str] = {
    "trajectories.jsonl": "The trajectories of `collector=jsonl`.",
    "activations/": "`<task>__<attempt>__<retry>/<answer>/<module>.npy`: the hidden states of `policy.activations`.",
    "report.html": "The report of `ares-exp report RUN`.",
    "wandb/": "The W&B run. `ares-exp wandb sync RUN` uploads an offline run.",
    ".hydra/": "Hydra's records.",
    "parts/": "Only for runs of `ares-exp merge`: the records of each shard.",
}

SWEEP: Mapping[str, str] = {
    "0/, 1/, …": "One run directory per job.",
    "plan.json": "The jobs.",
    "sweep.json": "The table of the sweep: jobs, states, results, and the best job.",
    "<job>/failure.json": "Exit code and message of a job that was rejected or failed.",
    "stop": "Ends the sweep. `ares-exp ctl SWEEP stop` creates it. You can also use `touch SWEEP/stop`.",
    "control/": "Commands of `ares-exp ctl SWEEP` to all jobs, while the sweep is running.",
    "control.jsonl": "One line per command.",
}


def names() -> list[str]:
    """Names of everything that may lie at the top of a run directory."""
    return [path.name for path in _paths().values()] + [name.rstrip("/") for name in OTHERS]


def versions() -> dict[str, str]:
    return {
        "trajectories (JSON, JSONL)": str(trajectory_versions.SCHEMA_VERSION),
        "snapshots": ".".join(map(str, snapshot_versions.SCHEMA)),
        "results.json": str(run_statistics.SCHEMA_VERSION),
        "replay.json": str(replay.SCHEMA_VERSION),
        "sweep.json": str(sweep_report.SCHEMA_VERSION),
    }


def files_page() -> str:
    """The page. Raises `KeyError` for a file of a run directory that `NAMED` does not describe."""
    run = Path("run")
    rows = [(f"`{path.name}{'' if path.suffix else '/'}`", NAMED[attribute]) for attribute, path in _paths(run).items()]
    return "".join(
        (
            GENERATED,
            "# Files of a run\n\nThis page lists the files in a run directory and in the folder of a sweep. By "
            "default, the run directory is `outputs/<name>/<date>_<time>/`. To choose another, set `hydra.run.dir=…`. "
            "[Architecture](../architecture.md#files-of-a-run) names the code that writes each file.\n\n"
            "## Run directory\n\n",
            table(("file", "content"), [*rows, *((f"`{name}`", said) for name, said in OTHERS.items())]),
            "\n## Sweep folder\n\n",
            table(("file", "content"), ((f"`{name}`", said) for name, said in SWEEP.items())),
            "\n## Fields of episodes.jsonl\n\n",
            _fields(EpisodeResult),
            "\n`error`:\n\n",
            _fields(ErrorInfo),
            "\n`replayed`:\n\n",
            _fields(Replayed),
            "\n`agent`:\n\n",
            _fields(AgentFacts),
            "\nEach of `stages`:\n\n",
            _fields(StageResult),
            "\n## Versions of formats\n\nTrajectories and snapshots of another version are rejected, and the error "
            "names both versions. [Trajectories](../trajectories.md#the-json-file-field-by-field) describes "
            "the fields of a trajectory.\n\n",
            table(("format", "version"), versions().items()),
        )
    )


def _paths(run: Path = Path("run")) -> dict[str, Path]:
    return {name: path for name, path in vars(RunDir(run)).items() if path != run}


def _fields(record: type) -> str:
    """The attributes that the docstring of a record describes, as a table."""
    return table(("field", "meaning"), ((_code(names), plain(said)) for names, said in documented_fields(record)))


def _code(names: str) -> str:
    return ", ".join(f"`{name.strip()}`" for name in names.split(","))
