"""docs/reference/files.md: what lies in a run directory and in a sweep folder, and the versions of the formats."""

from collections.abc import Mapping
from pathlib import Path

from ares_exp.policies import replay_report
from ares_exp.records.results import AgentFacts, EpisodeResult, ErrorInfo, Replayed, StageResult
from ares_exp.records.run_dir import RunDir
from ares_exp.records.statistics import run_statistics
from ares_exp.runs.sweeps import sweep_report
from ares_exp.snapshots import snapshot as snapshot_versions
from ares_exp.trajectories.files import episode_file as trajectory_versions
from tests.docs_reference.markdown import GENERATED, documented_fields, plain, table

NAMED: Mapping[str, str] = {
    "config": "the resolved config",
    "provenance": "git commit and dirty flag of the project and of the task set, versions, platform, command line, "
    "chosen options, warnings, tasks with their digests, commits that tasks came from",
    "episodes": "a line per episode, written when it ends ([fields](#fields-of-episodesjsonl))",
    "summary": "totals of outcomes, rewards, tokens, cost",
    "results": "totals, statistics with their intervals, and a row per task",
    "sessions": "a line whenever the run was started, resumed or ended",
    "responses": "`<episode_id>.jsonl`: requests and answers of an episode that is running or was interrupted, and its "
    "result; deleted when the attempt has a result",
    "trajectories": "`<episode_id>.json`: every step of an episode, whole when it has ended, of `collector=json`",
    "files": "`<episode_id>/verifier/`: reward files and output of the task's tests; `artifacts/` with a "
    "`manifest.json`; of a multi-step task `steps/<name>/` with both",
    "scores": "`<name>.jsonl`: of a scorer of `ares-exp score`, its config, then a line per episode",
    "snapshots": "`<episode_id>@<step>/snapshot.json`, with the shared contents of files in `objects/`",
    "branch_point": "of a branched run: the snapshot that its episodes started with, where the recorded run had none",
    "replay": "of a replay: every step compared, the diffs, rewards, determinism scores by task",
    "metrics": "of `tracker=jsonl`",
    "tensorboard": "of `tracker=tensorboard`",
    "service": "of `ares-exp serve`: `record.jsonl`, with a line per submission, end and acknowledgement, and "
    "`<cursor>.json`, an episode that is not acknowledged",
    "log": "the log, with tracebacks",
    "status": "the state of a running run: what episodes wait for, what is spent ([control.md](../control.md))",
    "control": "orders of `ares-exp ctl` that the run has not taken yet",
    "orders": "a line per order: author, time, reason and outcome",
}
"""What the files are that `RunDir` names, by its attributes."""

OTHERS: Mapping[str, str] = {
    "trajectories.jsonl": "of `collector=jsonl`",
    "activations/": "`<task>__<attempt>__<retry>/<answer>/<module>.npy`: hidden states, of `policy.activations`",
    "report.html": "of `ares-exp report RUN`",
    "wandb/": "the W&B run; an offline one is uploaded by `ares-exp wandb sync RUN`",
    ".hydra/": "Hydra's own records",
    "parts/": "of a run made by `ares-exp merge`: the records of each shard",
}

SWEEP: Mapping[str, str] = {
    "0/, 1/, …": "a run directory per job",
    "plan.json": "the jobs",
    "sweep.json": "the table of the sweep: jobs, states, results, the best",
    "<job>/failure.json": "exit code and message of a job that was refused or failed",
    "stop": "made by `ares-exp ctl SWEEP stop`, or by you (`touch SWEEP/stop`): ends the sweep",
    "control/": "orders of `ares-exp ctl SWEEP` to all jobs, while the sweep is running",
    "control.jsonl": "a line per order",
}


def names() -> list[str]:
    """Names of everything that may lie at the top of a run directory."""
    return [path.name for path in _paths().values()] + [name.rstrip("/") for name in OTHERS]


def versions() -> dict[str, str]:
    """The version of each format that is written now."""
    return {
        "trajectories (JSON, JSONL)": str(trajectory_versions.SCHEMA_VERSION),
        "snapshots": ".".join(map(str, snapshot_versions.SCHEMA)),
        "results.json": str(run_statistics.SCHEMA_VERSION),
        "replay.json": str(replay_report.SCHEMA_VERSION),
        "sweep.json": str(sweep_report.SCHEMA_VERSION),
    }


def files_page() -> str:
    """The page. Raises `KeyError` for a file of a run directory that `NAMED` does not describe."""
    run = Path("run")
    rows = [(f"`{path.name}{'' if path.suffix else '/'}`", NAMED[attribute]) for attribute, path in _paths(run).items()]
    return "".join(
        (
            GENERATED,
            "# Files of a run\n\nWhat lies in a run directory, `outputs/<name>/<date>_<time>/` or `hydra.run.dir=…`, "
            "and in the folder of a sweep. Which part of the code writes which file is in "
            "[architecture.md](../architecture.md#files-of-a-run).\n\n## Run directory\n\n",
            table(("file", "what it is"), [*rows, *((f"`{name}`", said) for name, said in OTHERS.items())]),
            "\n## Sweep folder\n\n",
            table(("file", "what it is"), ((f"`{name}`", said) for name, said in SWEEP.items())),
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
            "\n## Versions of formats\n\nTrajectories and snapshots of another version are rejected; the error names "
            "both versions. The fields of a trajectory are in "
            "[trajectories.md](../trajectories.md#the-json-file-field-by-field).\n\n",
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
