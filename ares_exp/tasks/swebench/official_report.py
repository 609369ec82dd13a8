"""A program that grades a log with the official harness. Arguments: paths of the request (JSON), log and report.

The harness runs in a separate process. Its import takes a second and reads `.env` files, and a log can make a regular
expression run indefinitely.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(request_path: str, log_path: str, report_path: str) -> None:
    """Writes the harness's report on the log."""
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    spec = TestSpec(image="", eval_script_list=[], repo="", version="", **request)
    prediction = {"instance_id": request["instance_id"], "model_patch": "", "model_name_or_path": "ares_exp"}
    report = get_eval_report(spec, prediction, log_path, include_tests_status=True)
    Path(report_path).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
