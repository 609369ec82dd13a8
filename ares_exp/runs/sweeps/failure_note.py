"""The note in the folder of a sweep's job that was refused or failed, and so has no results."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.record_files import read_json_object
from ares_exp.records.run_dir import dump_json, write_atomically
from ares_exp.records.secrets import MASK, typed_secrets

logger = logging.getLogger(__name__)

FAILURE = "failure.json"
MAX_CHARS = 20_000


class FailureNote:
    """`<job>/failure.json`.

    Attributes:
        path: The file.
    """

    def __init__(self, job_dir: Path) -> None:
        self.path = job_dir / FAILURE

    def write(self, exit_code: int, message: str) -> None:
        """Leaves it, in the place of an earlier one. Where that is impossible the job counts as not complete anyway."""
        for secret in typed_secrets(sys.argv[1:]):
            message = message.replace(secret, MASK)
        note = {"exit_code": exit_code, "message": message[:MAX_CHARS]}
        try:
            write_atomically(self.path, dump_json(note, indent=2) + "\n")
        except OSError as error:
            logger.warning("Writing %s failed: %s", self.path, error)

    def remove(self) -> None:
        """Takes an earlier one away: the job has results now."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def read(self) -> tuple[int, str] | None:
        """Reads exit code and message; `None` if there is no note.

        Raises:
            ConfigError: It is broken.
        """
        try:
            note = read_json_object(self.path, max_bytes=8 * MAX_CHARS)
            code, message = note["exit_code"], note["message"]
        except FileNotFoundError:
            return None
        except (OSError, KeyError) as error:
            raise ConfigError(f"{self.path} is broken: {error!r:.200}.") from None
        return (code if code == exit_codes.USAGE else exit_codes.INCOMPLETE), str(message)[:MAX_CHARS]
