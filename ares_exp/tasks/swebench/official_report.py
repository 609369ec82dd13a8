"""A program that grades the output of a test run (the log) with the official harness.

Its arguments are the paths of the request (JSON), the log, and the report to write. The harness runs in this separate
process because its import takes a second and reads `.env` files. In addition, the process can be killed if the log
makes a regular expression of the harness run indefinitely.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(request_path: str, log_path: str, report_path: str) -> None:
    """Grades the log at `log_path`, and writes the harness's report to `report_path` as JSON."""
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    spec = TestSpec(image="", eval_script_list=[], repo="", version="", **request)
    prediction = {"instance_id": request["instance_id"], "model_patch": "", "model_name_or_path": "ares_exp"}
    report = get_eval_report(spec, prediction, log_path, include_tests_status=True)
    Path(report_path).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
