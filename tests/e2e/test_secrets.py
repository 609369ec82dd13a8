"""No secret reaches the disk, the terminal, or W&B's files."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ares_exp.tasks.task_set import SAMPLES
from tests.loopback_endpoint import LoopbackEndpoint

KEY = "sk-very-secret-key-0123456789"
TYPED = "typed-secret-value"


@pytest.mark.local
def test_no_secret_is_written_anywhere(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    done = cli(
        "policy=openai",
        "policy.model=m",
        f"policy.base_url={endpoint.url}",
        f"+policy.extra_body.api_token={TYPED}",
        "env.limit=1",
        "limits.steps=2",
        env={"OPENAI_API_KEY": KEY},
    )
    assert done.returncode == 0, done.stderr
    assert endpoint.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert endpoint.requests[0].body["api_token"] == TYPED
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        assert KEY.encode() not in content, path
        assert TYPED.encode() not in content, path
    assert KEY not in done.stdout + done.stderr


@pytest.mark.local
@pytest.mark.once
def test_links_in_tasks_reach_no_host_files(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    outside, tasks = tmp_path / "private" / "key", tmp_path / "tasks"
    outside.parent.mkdir(mode=0o700)
    outside.write_text(KEY)
    outside.chmod(0o600)
    for name in ("instruction", "dockerfile", "shares"):
        shutil.copytree(SAMPLES / "write-greeting", tasks / name)
    (tasks / "instruction" / "instruction.md").unlink()
    (tasks / "instruction" / "instruction.md").symlink_to(outside)
    dockerfile = tasks / "dockerfile" / "environment" / "Dockerfile"
    outside.with_name("Dockerfile").write_text(f"{dockerfile.read_text()}ENV COPIED={KEY}\n")
    dockerfile.unlink()
    dockerfile.symlink_to("../../../private/Dockerfile")
    shutil.move(tasks / "shares" / "environment", tasks / ".environment")
    (tasks / "shares" / "environment").symlink_to("../.environment")
    policy = ("policy=openai", "policy.model=m", f"policy.base_url={endpoint.url}", "policy.api_key_env=null")
    done = cli("env.path=tasks", "tracker=none", "limits.steps=2", *policy)
    assert done.returncode == 0, done.stderr
    ran = [path.name.partition("__")[0] for path in tmp_path.glob("outputs/*/*/trajectories/*.json")]
    assert ran == ["shares"]
    for link, target in (("instruction/instruction.md", outside), ("dockerfile/environment", outside.parent)):
        assert str(tasks / link) in done.stderr
        assert f"found a link to {target}" in done.stderr
    assert endpoint.requests
    assert KEY not in str([request.body for request in endpoint.requests])
    for path in (tmp_path / "outputs").rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
