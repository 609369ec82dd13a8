"""Pictures of the page for the documentation, of runs that are run for them: `python -m tests.browser.pictures`."""

import contextlib
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from ares_exp.commands.cli.run_command import run_command
from tests.browser.chromium import Page, chromium
from tests.demo_models import demo_models

report = partial(run_command, "report", program="ares-exp report")

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
OPTION = "# replies without a model\n_target_: tests.browser.improviser.Improviser\n"
FAILED = "payload.runs[0].episodes.find(one => one.reward === 0 && one.num_steps > 4).episode_id"
FAILED_FIRST = "payload.runs[0].episodes.find(one => one.reward === 0).episode_id"


def execute(folder: Path, name: str, *overrides: str) -> None:
    options = folder / "options" / "policy" / "improviser.yaml"
    options.parent.mkdir(parents=True, exist_ok=True)
    options.write_text(OPTION)
    command = [sys.executable, "-m", "ares_exp", "--config-dir", "options", "policy=improviser"]
    where = f"hydra.{'sweep' if '-m' in overrides else 'run'}.dir=outputs/{name}"
    settings = ["tracker=none", where]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    words = [*command, *settings, *overrides]
    subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def tutorial(folder: Path) -> Path:
    """Runs the commands of the tutorial in `folder`; the last one writes the report that is returned."""
    folder.mkdir()
    commands = re.findall(r"(?ms)^```bash\n(.*?)^```$", (ROOT / "docs" / "tutorial.md").read_text())
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(folder), "WANDB_MODE": "disabled"}
    with demo_models() as url:
        script = "".join(commands).replace("http://127.0.0.1:8000/v1", url)
        subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return folder / "comparison.html"


def reports(folder: Path) -> dict[str, Path]:
    execute(folder, "first", "attempts=5", "snapshot=every_step")
    execute(folder, "better", "attempts=5", "policy.skill=0.9")
    execute(folder, "sweep", "-m", "attempts=2", "policy.skill=0.2,0.9", "policy.temperature=0,0.5,1")
    places = {"first": ["first"], "pair": ["first", "better"], "sweep": ["sweep"]}
    made = {name: folder / f"{name}.html" for name in places}
    for name, runs in places.items():
        with contextlib.chdir(folder):  # paths are shown as they are given
            report([*(f"outputs/{run}" for run in runs), "-o", str(made[name])])
    return made


def renew(page: Page, made: dict[str, Path]) -> None:
    page.size(1100, 780)
    page.open(made["first"].as_uri())
    page.picture(PICTURES / "overview.png")
    page.go(page.run(f"return episodeAddress(0, {FAILED}, 3)"))
    page.until("return document.querySelector('.step.here') !== null")
    page.picture(PICTURES / "episode.png")
    page.open(made["pair"].as_uri())
    page.picture(PICTURES / "compare.png")
    page.size(1100, 700)
    page.open(made["tutorial"].as_uri())
    page.picture(PICTURES / "tutorial-compare.png")
    page.go(page.run(f"return episodeAddress(0, {FAILED_FIRST}, 2)"))
    page.until("return document.querySelector('.step.here') !== null")
    page.picture(PICTURES / "tutorial-episode.png")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, chromium(Path(scratch) / "profile") as page:
        renew(page, {**reports(Path(scratch)), "tutorial": tutorial(Path(scratch) / "tutorial")})


if __name__ == "__main__":
    main()
