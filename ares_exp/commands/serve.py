"""The command `serve`: starts a run to which trainers in other processes submit episodes over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ares_exp.commands.cli.run_command import add_config_dir
from ares_exp.config.overrides import value_of
from ares_exp.errors import ConfigError, UserError, close_matches
from ares_exp.records import exit_codes

if TYPE_CHECKING:
    from ares_exp.training.service.serving import ServeOptions

PREFIX = "serve."
NAME = "name=serve"
"""Override of the run's name, so that its default directory is `outputs/serve/<date>_<time>`."""
NO_EFFECT = ("policy", "attempts", "branch_from", "replay")
HELP = """\
Runs episodes for trainers in other processes. Trainers submit rollouts over HTTP, and the agents' LLM calls go to the
endpoint of their trainer. You can set the same options and keys as for a run, except for `policy` and `attempts`.
Ctrl-C ends the service. To continue its rollouts, start it again with `resume=RUN`.
[arguments]
Options of the service:
  serve.host=127.0.0.1       address to listen on; other addresses require serve.key_env
  serve.port=8300            port to listen on; 0 selects a free port
  serve.key_env=null         environment variable with the key of requests: `Authorization: Bearer KEY`
  serve.queue=1024           maximum number of rollouts that run or wait
  serve.unacknowledged=4096  maximum number of rollouts without an acknowledgement
  serve.lease_sec=900        cancel rollouts if their trainer sends no call for this number of seconds

Examples:
  %(prog)s env=harbor env.path=tasks agent=tools container=docker concurrency=64
  %(prog)s env=harbor agent=claude_code executor=ray serve.host=0.0.0.0 serve.key_env=SERVICE_KEY
  %(prog)s resume=outputs/serve/2026-01-01_12-00-00

Exit codes: 130 ended by Ctrl-C; 1 a record could not be written; 2 the command line or the config is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys as for a run, and serve.* (see below)")
    add_config_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    from ares_exp.runs.composing import compose_run, run_log
    from ares_exp.runs.from_python import checked_overrides
    from ares_exp.runs.run import run_attended
    from ares_exp.runs.steady_loop import run_steadily
    from ares_exp.training.service.serving import Service

    own = [one for one in arguments.overrides if one.startswith(PREFIX)]
    overrides = checked_overrides([one for one in arguments.overrides if one not in own])
    keys = {one.lstrip("+~").partition("=")[0] for one in overrides}
    for key in NO_EFFECT:
        if any(one.partition(".")[0] == key for one in keys):
            raise ConfigError(f"`{key}` has no effect on a service, because the trainers set it. Leave out `{key}=…`.")
    if not keys & {"name", "resume"}:
        overrides = [NAME, *overrides]
    service = Service(serve_options(own))
    run = compose_run(
        overrides, arguments.config_dir, quiet=False, given={"trainer": service, "policy": service.policy}
    )
    with run_log(run.log_config, overrides):
        try:
            summary = run_steadily(run_attended(run))
        except UserError:
            run.run_dir.discard()
            raise
    return exit_codes.INTERRUPTED if summary.interrupted else exit_codes.COMPLETE


def serve_options(overrides: Sequence[str]) -> ServeOptions:
    """Parses overrides such as `serve.port=8300`. Raises `ConfigError` for an unknown option or an invalid value."""
    from pydantic import ValidationError

    from ares_exp.records.validation import explain_validation
    from ares_exp.training.service.serving import ServeOptions

    values = {}
    for one in overrides:
        name, _, value = one.removeprefix(PREFIX).partition("=")
        if name not in ServeOptions.model_fields:
            known = [f"{PREFIX}{field}" for field in ServeOptions.model_fields]
            raise ConfigError(f"There is no option `{PREFIX}{name}`.{close_matches(PREFIX + name, known)}")
        values[name] = value_of(value)
    try:
        return ServeOptions.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"The options in `serve` are invalid: {explain_validation(error)}.") from None
