"""The inventory of what users rely on: help texts, composed configs, formats of files, tests, public names.

    python -m tests.inventory                         writes all of it beside this file
    python -m tests.inventory --check                 prints what differs; its exit code is 1 if anything does
    python -m tests.inventory --check help config     these parts alone

It was first written by the last commit before the reorganisation of the package: what differs from it since is either
a line of the changelog or a mistake. The parts: `help/`, `config/`, `files.txt`, `tests.txt`, `public_names.txt`. All
but `files.txt` take seconds; for that runs are played, a minute or two, which needs container=local. Everything needs
the extra `test`. Help texts are those of argparse in Python 3.11; other versions may break lines elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.fixtures.small_runs import Player, play

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
MODULES = (
    *("compare", "containers", "export_job", "list", "merge", "snapshots", "sweeps", "trackers", "trajectories"),
)
"""The commands of the package, each `python -m ares_exp.<module>`."""
COLUMNS = "100"
SEVERAL = {
    "collector=[json,jsonl,parquet,atif]": "collector.several",
    "tracker=[wandb,jsonl,tensorboard]": "tracker.several",
    "env=twenty_questions policy@env.oracle=chat_completions": "env.twenty_questions_with_oracle",
    "hydra/sweeper=optuna_maximize": "hydra_sweeper.optuna_maximize",
}
"""Choices that are no single option of a group, and what their files are called."""

Texts = Mapping[str, str]


def main(argv: list[str]) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser("python -m tests.inventory", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all by default")
    parser.add_argument("--check", action="store_true", help="print what differs from what is recorded, write nothing")
    arguments = parser.parse_args(argv)
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"expected some of {', '.join(PARTS)}, got {unknown[0]!r}")
    differs = False
    for part in arguments.parts or PARTS:
        texts = PARTS[part]()
        if arguments.check:
            differs |= _print_differences(texts, _recorded(part))
        else:
            _write(texts, _recorded(part))
    return int(differs)


def help_texts() -> Texts:
    """What `--help` prints, of every command and each of its subcommands."""
    texts = {"help/ares_exp.txt": _help("-m", "ares_exp")}
    script = Path(sys.executable).with_name("ares-exp")
    texts["help/ares-exp.txt"] = _output([str(script), "--help"])
    found = {path.parent.name for path in (ROOT / "ares_exp").glob("*/__main__.py")}
    for module in sorted({*MODULES, *found}):
        texts[f"help/ares_exp.{module}.txt"] = text = _help("-m", f"ares_exp.{module}")
        for command in _subcommands(text):
            texts[f"help/ares_exp.{module}.{command}.txt"] = _help("-m", f"ares_exp.{module}", command)
    return texts


def _help(*words: str) -> str:
    return _output([sys.executable, *words, "--help"])


def _output(command: list[str]) -> str:
    """What a command prints, the checkout's own path left out; and its exit code, where that is not 0."""
    own = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "PYTHON_COLORS")}
    env = {**own, "COLUMNS": COLUMNS, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=60, check=False)
    text = (done.stdout + done.stderr).replace(str(ROOT), "<root>")
    return text if done.returncode == 0 else f"{text}exit code {done.returncode}\n"


def _subcommands(text: str) -> list[str]:
    """The subcommands that a help text names: the indented words below `COMMAND`."""
    _, found, rest = text.partition("positional arguments:\n  COMMAND\n")
    if not found:
        _, found, rest = text.partition("positional arguments:\n  command\n")
    return re.findall(r"^    (\w+)\b", rest.partition("\n\n")[0], re.MULTILINE)


def configs() -> Texts:
    """The composed config of every option: what is not as in the default one, and the option's own group."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from ares_exp.config.hydra_setup import set_up_hydra

    conf = ROOT / "conf"
    set_up_hydra()

    def composed(choices: str = "") -> dict[str, Any]:
        with initialize_config_dir(str(conf), version_base="1.3"):
            config = compose("config", overrides=choices.split(), return_hydra_config=True)
        plain: Any = OmegaConf.to_container(config, resolve=False)
        of_hydra = ("run", "sweep", "output_subdir", "callbacks", "job_logging", "hydra_logging", "sweeper", "launcher")
        plain["hydra"] = {name: plain["hydra"][name] for name in of_hydra}
        return plain

    default = composed()
    texts = {"config/default.yaml": _yaml(default)}
    options = {
        f"{path.parent.name}={path.stem}": f"{path.parent.name}.{path.stem}"
        for path in sorted(conf.glob("*/*.yaml"))
        if path.parent.name != "hydra"
    }
    for choices, name in {**options, **SEVERAL}.items():
        group = choices.partition("=")[0]
        config = composed(choices)
        kept = {key: value for key, value in config.items() if value != default.get(key) or key == group}
        if "hydra" in kept:
            kept["hydra"] = {key: value for key, value in kept["hydra"].items() if value != default["hydra"][key]}
        texts[f"config/{name}.yaml"] = f"# {choices}\n{_yaml(kept)}"
    return texts


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120).replace(str(ROOT), "<root>")


def files() -> Texts:
    """The files that runs of each kind have, and their schemas."""
    from tests.inventory.more_runs import describe
    from tests.inventory.schemas import Files

    found = Files()
    with tempfile.TemporaryDirectory(prefix="inventory-") as folder:
        player = Player(Path(folder))
        play(player)
        describe(player, found)
    return {"files.txt": found.text()}


def tests() -> Texts:
    """The e2e tests, the cases of the compatibility table, and the functions that are tests anywhere else."""
    from tests.compatibility.table import CASES

    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/e2e"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    nodes = sorted(line for line in done.stdout.splitlines() if "::" in line)
    cases = [f"{type(case).__name__} {case.section} {case.id}{' (deviates)' * bool(case.deviation)}" for case in CASES]
    others = [
        f"{path.relative_to(ROOT)}::{name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.parent.name != "e2e"
        for name in _test_functions(path)
    ]
    sections = {"End-to-end tests": nodes, "Cases of the compatibility table": cases, "Other tests": others}
    return {"tests.txt": "\n".join(f"# {title}\n\n" + "".join(f"{x}\n" for x in of) for title, of in sections.items())}


def _test_functions(path: Path) -> list[str]:
    """Functions and methods of a file that are tests, or part of a contract that others run."""
    is_test = path.name.startswith("test_") or path.name.endswith("_contract.py")
    tree = ast.parse(path.read_text()) if is_test else ast.Module([], [])
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sorted(node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_"))


def public_names() -> Texts:
    """What scripts and configs name: `ares_exp.__all__`, targets of the config, errors, presets, Gymnasium's ids."""
    import gymnasium
    from hydra.utils import get_object

    import ares_exp
    from ares_exp import errors

    lines = ["# ares_exp.__all__", ""]
    for name in ares_exp.__all__:
        named = getattr(ares_exp, name)
        lines += [name, *_arguments(named), *_members(named)]
    lines += ["", "# Targets of conf/", ""]
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        for target in re.findall(r"^ *_target_: (\S+)", path.read_text(), re.MULTILINE):
            option = path.relative_to(ROOT / "conf").with_suffix("")
            lines += [f"{option}: {target}", *_arguments(get_object(target))]
    lines += ["", "# Errors, with what they are kinds of", ""]
    lines += [
        f"{name}: {', '.join(base.__name__ for base in found.__mro__[1:-1])}"
        for name, found in sorted(vars(errors).items())
        if inspect.isclass(found) and found.__module__ == errors.__name__
    ]
    lines += ["", "# Presets", "", *(str(preset) for preset in ares_exp.list_presets())]
    __import__("ares_exp.gym")
    ids = sorted(name for name in gymnasium.registry if name.startswith("ares_exp/"))
    return {"public_names.txt": "\n".join([*lines, "", "# Ids of Gymnasium", "", *ids, ""])}


def _arguments(named: object) -> list[str]:
    """What it is called with, an argument a line."""
    try:
        parameters = inspect.signature(named).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "", inspect.Parameter.KEYWORD_ONLY: ", by keyword"}
    return [f"    {_text(one)}{kinds.get(one.kind, '')}" for one in parameters]


def _members(named: object) -> Iterator[str]:
    """The public methods and attributes of a class, but for those of plain tuples."""
    if not inspect.isclass(named):
        return
    for name in sorted(name for name in dir(named) if not name.startswith("_") and not hasattr(tuple, name)):
        member = inspect.getattr_static(named, name)
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        yield f"    .{name}{_text(inspect.signature(member)) if inspect.isfunction(member) else ''}"


def _text(part: object) -> str:
    """An argument or a signature; where in memory a default is says nothing."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(part))


def _recorded(part: str) -> Texts:
    """What is on disk of a part."""
    folder = HERE / part
    paths = sorted(folder.iterdir()) if folder.is_dir() else [HERE / f"{part}.txt"]
    return {str(path.relative_to(HERE)): path.read_text() for path in paths if path.exists()}


def _write(texts: Texts, recorded: Texts) -> None:
    for name in recorded.keys() - texts.keys():
        (HERE / name).unlink()
    for name, text in texts.items():
        (HERE / name).parent.mkdir(exist_ok=True)
        (HERE / name).write_text(text)


def _print_differences(texts: Texts, recorded: Texts) -> bool:
    """Prints a unified diff from what is recorded to what is; returns whether there is one."""
    differs = False
    for name in sorted({*texts, *recorded}):
        was, now = (of.get(name, "").splitlines(keepends=True) for of in (recorded, texts))
        for line in difflib.unified_diff(was, now, f"recorded/{name}", f"now/{name}", n=1):
            differs = True
            print(line, end="" if line.endswith("\n") else "\n")
    return differs


PARTS: Mapping[str, Callable[[], Texts]] = {
    "help": help_texts,
    "config": configs,
    "files": files,
    "tests": tests,
    "public_names": public_names,
}
