"""`branch_from=`: the composed config; other tests cover the job."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.loopback_endpoint import LoopbackEndpoint

pytestmark = [pytest.mark.local, pytest.mark.once]


def composed(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)  # type: ignore[no-any-return]


def test_branch_inherits_the_config_of_its_run(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "options" / "policy").mkdir(parents=True)
    (tmp_path / "options" / "policy" / "mine.yaml").write_text(
        "# mine\n_target_: ares_exp.policies.scripted.ScriptedPolicy\nreplies: ['no block']\nrepeat_last: true\n"
    )
    own = ("--config-dir", "options", "policy=mine")
    done = cli(*own, "tracker=none", "env.limit=1", "limits.steps=3", "seed=4", "hydra.run.dir=first")
    assert done.returncode == 0, done.stderr
    [trajectory] = (tmp_path / "first" / "trajectories").iterdir()
    task = trajectory.name.partition("__")[0]

    typed = (f"branch_from=first/{task}@2", "branches=8", "policy.replies=[b]", "branch.inject='go on, please'")
    config = composed(cli("--cfg", "job", *typed))
    assert (config["branch_from"], config["branches"]) == (f"first/{trajectory.stem}@2", 8)
    assert config["attempts"] == "${branches}"
    assert (config["env"]["tasks"], config["env"]["limit"]) == ([task], None)
    assert (config["seed"], config["limits"]["steps"], config["branch"]["inject"]) == (4, 3, "go on, please")
    assert (config["policy"]["replies"], config["policy"]["repeat_last"]) == (["b"], True)

    resolved = ("--cfg", "job", "--resolve", f"branch_from=first/{task}@0", "branches=3", "policy=oracle")
    config = composed(cli(*resolved))
    assert config["attempts"] == 3
    assert config["policy"] == {"_target_": "ares_exp.policies.oracle.OraclePolicy"}


def test_masked_secrets_must_be_given_again(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    secret = "+policy.extra_body.api_token=typed-secret-value"
    chat = ("policy=openai", "policy.model=m", f"policy.base_url={endpoint.url}", "policy.api_key_env=null")
    done = cli("tracker=none", "env.limit=1", *chat, secret, "hydra.run.dir=first")
    assert done.returncode == 0, done.stderr
    [trajectory] = (tmp_path / "first" / "trajectories").iterdir()
    again = ("--cfg", "job", f"branch_from=first/{trajectory.stem}@0")
    done = cli(*again)
    assert done.returncode == 2
    assert "policy.extra_body.api_token=…" in done.stderr
    config = composed(cli(*again, "policy.extra_body.api_token=other"))
    assert config["policy"]["extra_body"] == {"api_token": "other"}
    assert composed(cli("--cfg", "job", "replay=first"))["replay"] == "first", "the recorded responses need no key"
