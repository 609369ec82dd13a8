"""The preparation of a run from Python: composes its config, and creates its directory and Hydra's files in it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.config.explain import explain
from ares_exp.config.hydra_setup import ONE_AT_A_TIME, OptionSearchPath, set_up_hydra, store_recorded_config
from ares_exp.config.options import ROOT_CONFIG, conf_dir, log_problems, refuse_unreadable
from ares_exp.config.overrides import flags_and_overrides, with_home
from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import RunDir, RunLogHandler, fresh_dir, refuse_used_run_dir
from ares_exp.records.secrets import RepeatedWarnings, SecretFilter, typed_secrets

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ares_exp.runs.run import Run

_SWEEP = "Add `-m` for a sweep, with one run per value"


def compose_run(
    overrides: Sequence[str],
    config_dirs: Sequence[Path],
    *,
    quiet: bool,
    given: Mapping[str, Any] | None = None,
) -> Run:
    """Composes overrides in the same way as the command line, and creates the run and its directory.

    Hydra's record of the config is also written to the directory. If `given` contains an object for a group, such as
    `policy`, uses this object instead of the group's config. The other arguments are the same as for `run`.

    Raises:
        UserError: The run cannot be created. Its directory is removed again.
    """
    overrides = with_home(overrides)
    if (objection := refuse_unreadable(config_dirs) or refuse_used_run_dir(overrides)) is not None:
        raise ConfigError(objection)
    log_problems(config_dirs)
    with ONE_AT_A_TIME:
        from ares_exp.runs.run import Run

        before = OptionSearchPath.config_dirs
        set_up_hydra(config_dirs)
        fresh_dir.cache_clear()  # an earlier run may have started in the same second
        try:
            return _compose(overrides, config_dirs, partial(Run, quiet=quiet, given=given))
        finally:
            OptionSearchPath.config_dirs = before


def _compose(overrides: Sequence[str], config_dirs: Sequence[Path], make_run: Callable[..., Run]) -> Run:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from ares_exp.runs.resume.compose_from_run import compose_from_run

    root_config, source = ROOT_CONFIG, None
    try:
        command = compose_from_run([f"--config-dir={folder}" for folder in config_dirs], overrides)
        source = command.source
        if command.values is not None:
            root_config = store_recorded_config(command.values, command.choices)
        flags, lines = flags_and_overrides(command.argv)
        if {"-m", "--multirun"} & {*flags} or any(one.lstrip("+").startswith("hydra.mode=") for one in lines):
            raise ConfigError("A sweep can only be resumed on the command line: `python -m ares_exp resume=<sweep>`.")
        return _run_hydra(root_config, lines, make_run)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        taken = f" (The overrides recorded in {source} also apply.)" if source is not None else ""
        said = explain(error, overrides, root_config, config_dirs).replace(_SWEEP, "Loop over runs for a sweep")
        raise ConfigError(f"{said}{taken}") from None


def _run_hydra(root_config: str, overrides: list[str], make_run: Callable[..., Run]) -> Run:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    made: list[Run | Exception] = []

    def make(config: DictConfig) -> None:
        hydra = HydraConfig.get()
        try:
            made.append(make_run(config, hydra))
        except Exception as error:  # not raised, because Hydra would print its own message
            RunDir(Path(hydra.runtime.output_dir)).discard()
            made.append(error)

    with initialize_config_dir(str(conf_dir()), job_name="ares_exp", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        hydra.run(root_config, make, overrides, with_log_configuration=False)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


@contextmanager
def run_log(config: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[None]:
    """Writes log records to `run.log` during the block, in addition to the log handlers of the user's script.

    If the script has no handlers, also prints warnings to standard error.

    Args:
        config: Hydra's logging config, which defines the names and formats of the handlers.
        overrides: Overrides of the run. If they contain secrets, the log records show them masked.
    """
    root, ours = logging.getLogger(), logging.getLogger("ares_exp")
    handlers, formats = config.get("handlers", {}), config.get("formatters", {})
    added: list[logging.Handler] = []
    if (file := handlers.get("file", {}).get("filename")) is not None:
        added.append(_formatted(RunLogHandler(file, delay=True), formats.get("file")))
    if not root.handlers:
        terminal = _formatted(logging.StreamHandler(sys.stderr), formats.get("terminal"))
        terminal.setLevel(logging.WARNING)
        terminal.addFilter(RepeatedWarnings())
        added.append(terminal)
    for handler in added:
        handler.addFilter(SecretFilter(typed_secrets(overrides)))
    before = ours.level, ours.propagate
    passing_on = _PassingOn(ours.getEffectiveLevel(), added[:1] if file is not None else [])
    for handler in added:
        root.addHandler(handler)
    ours.addHandler(passing_on)
    ours.setLevel(min(logging.INFO, ours.getEffectiveLevel()))
    ours.propagate = False
    try:
        yield
    finally:
        ours.removeHandler(passing_on)
        ours.setLevel(before[0])
        ours.propagate = before[1]
        for handler in added:
            root.removeHandler(handler)
            handler.close()


def _formatted(handler: logging.Handler, formatter: Mapping[str, Any] | None) -> logging.Handler:
    handler.setFormatter(logging.Formatter((formatter or {}).get("format")))
    return handler


class _PassingOn(logging.Handler):
    """Passes log records of the package to the handlers of the root logger.

    The run's own handlers (`every`) get all records. The handlers of the user's script get records of at least `level`.
    """

    def __init__(self, level: int, every: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._from, self._every = level, every

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger().handlers:
            wanted = handler in self._every or record.levelno >= self._from
            if wanted and record.levelno >= handler.level:
                handler.handle(record)
