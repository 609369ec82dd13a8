"""What the command line answers without running anything, and users' own options."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_program_finds_modules_of_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "my_scorers.py").write_text("def half(episode, container):\n    return 0.5\n")
    words = [str(Path(sys.executable).with_name("ares-exp")), "env.scorers=[my_scorers.half]", "env.limit=1"]
    done = subprocess.run([*words, "tracker=none"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mean reward 1.50" in done.stdout


def test_the_example_of_the_scripted_policy_runs(cli: Any) -> None:
    example = _described(ROOT / "conf" / "policy" / "scripted.yaml").partition("In bash: ")[2]
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {example}"], capture_output=True, text=True, check=True)
    done = cli(*words.stdout.split("\0")[:-1], "env.limit=1", "tracker=none")
    assert (done.returncode, "completed" in done.stdout) == (0, True), done.stderr
