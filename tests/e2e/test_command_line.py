"""What the command line answers without running anything, and users' own options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ares_exp.config.options import OPTION_GROUPS
from ares_exp.config.schema import KEYS

ROOT = Path(__file__).parent.parent.parent


def test_help_names_every_group_option_and_key(cli: Any) -> None:
    done = cli("--help")
    assert done.returncode == 0
    for key in KEYS:
        assert re.search(rf"\n  {key}(=|\.\*)", done.stdout)
    assert "Examples:" in done.stdout
    groups = cli("--help", *OPTION_GROUPS).stdout.splitlines()
    for group in OPTION_GROUPS:
        assert f"\n  {group} " in done.stdout
        assert f"  {group}" in groups
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            assert path.stem in done.stdout
            [line] = [line for line in groups if line.startswith(f"    {path.stem} ") and _described(path) in line]
            assert line


def _described(path: Path) -> str:
    first = next(line for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line)
    return first[2:]


def test_cfg_job_prints_the_config(cli: Any) -> None:
    done = cli("--cfg", "job", "attempts=3")
    assert done.returncode == 0
    assert "attempts: 3" in done.stdout
    assert not done.stderr


@pytest.mark.local
def test_an_option_and_a_policy_of_ones_own(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "options" / "policy").mkdir(parents=True)
    (tmp_path / "options" / "policy" / "mine.yaml").write_text("# always submits\n_target_: my_policy.Submit\n")
    (tmp_path / "my_policy.py").write_text(
        "from ares_exp import LLMResponse\n"
        "class Submit:\n"
        "    async def __call__(self, request):\n"
        "        return LLMResponse.from_text('```bash\\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n```')\n"
    )
    arguments = ("--config-dir", "options", "policy=mine", "tracker=none", "env.limit=1", "hydra.run.dir=run")
    done = cli(*arguments, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert '"reward": 0.0' in (tmp_path / "run" / "episodes.jsonl").read_text()
    assert "mine" in cli("--help", "--config-dir", "options").stdout


def test_the_program_finds_modules_of_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "my_scorers.py").write_text("def half(episode, container):\n    return 0.5\n")
    words = [str(Path(sys.executable).with_name("ares-exp")), "env.scorers=[my_scorers.half]", "env.limit=1"]
    done = subprocess.run([*words, "tracker=none"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mean reward 1.50" in done.stdout
