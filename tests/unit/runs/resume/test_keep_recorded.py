"""A repeated command continues with the recorded config, whatever has changed on disk since."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from ares_exp.records.run_dir import RunDir
from ares_exp.runs.resume.compose_from_run import keep_recorded

POLICY = {"_target_": "some.Policy", "model": "m", "temperature": 0.5}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- policy=mine\n- seed=3\n")
    (tmp_path / ".hydra" / "hydra.yaml").write_text(
        json.dumps({"hydra": {"runtime": {"cwd": str(Path.cwd()), "config_sources": []}}})
    )
    made.episodes.write_text("")
    record(made)
    return made


def record(run_dir: RunDir, **values: Any) -> None:
    recorded = {"policy": POLICY, "seed": 3, "attempts": 1, "concurrency": 4, "limits": {"steps": 250}, **values}
    run_dir.config.write_text(OmegaConf.to_yaml(OmegaConf.create(recorded)))


def composed(**values: Any) -> DictConfig:
    now = {"policy": POLICY, "seed": 3, "attempts": 1, "concurrency": 4, "limits": {"steps": 250}, **values}
    config = OmegaConf.create(now)
    OmegaConf.set_struct(config, True)
    return config


def restored(run_dir: RunDir, config: DictConfig, *typed: str) -> tuple[list[str], Any]:
    changed = keep_recorded(config, run_dir, ["policy=mine", "seed=3", "resume=true", *typed])
    return changed, OmegaConf.to_container(config)


def test_untyped_values_are_restored(run_dir: RunDir) -> None:
    now = composed(policy={**POLICY, "temperature": 1.0, "top_p": 0.9}, limits={"steps": 10}, concurrency=16)
    changed, config = restored(run_dir, now)
    assert changed == ["policy", "limits"]
    assert config["policy"] == POLICY
    assert config["limits"]["steps"] == 250
    assert config["concurrency"] == 16, "it changes no result"


@pytest.mark.parametrize("typed", ["policy.temperature=1", "+policy.extra=1", "policy=other", "experiment=other"])
def test_typed_values_are_unchanged(run_dir: RunDir, typed: str) -> None:
    now = composed(policy={**POLICY, "temperature": 1.0})
    changed, config = restored(run_dir, now, typed)
    assert changed == []
    assert config["policy"]["temperature"] == 1.0


@pytest.mark.parametrize(
    "recorded",
    [
        {**POLICY, "_target_": "os.system"},
        {**POLICY, "nested": {"_target_": "os.system"}},
        {**POLICY, "model": "${oc.env:HOME}"},
        {**POLICY, "extra_body": {"key": "***"}},
    ],
)
def test_invalid_recorded_values_are_ignored(run_dir: RunDir, recorded: dict[str, Any]) -> None:
    text = json.dumps({"policy": recorded, "seed": 3})
    run_dir.config.write_text(text)
    changed, config = restored(run_dir, composed())
    assert changed == []
    assert config["policy"] == POLICY


def test_recorded_path_is_made_absolute(run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd()
    record(run_dir, env={"path": "tasks"})
    monkeypatch.chdir(tmp_path)
    assert restored(run_dir, composed(env={"path": str(here / "tasks")}))[0] == []
    assert restored(run_dir, composed(env={"path": "tasks"}))[1]["env"] == {"path": str(here / "tasks")}


def test_attempts_are_kept_from_the_last_session(run_dir: RunDir) -> None:
    run_dir.sessions.write_text(
        '{"started": 1.0, "attempts": 1}\n{"started": 2.0, "attempts": 4}\n{"ended": 3.0}\n{"atte'
    )
    assert restored(run_dir, composed())[1]["attempts"] == 4
    assert restored(run_dir, composed(attempts=2), "attempts=2")[1]["attempts"] == 2
