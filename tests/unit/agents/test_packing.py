"""Packing by the real npm and uv, from a registry on 127.0.0.1, and use of the packages by a run."""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import ares_exp
from ares_exp.agents.toolbox import placing
from ares_exp.agents.toolbox.package import this_machine
from ares_exp.agents.toolbox.package_store import MANIFEST, AgentStore, Installed
from ares_exp.agents.toolbox.placing import package_for
from ares_exp.commands.cli.run_command import run_command
from ares_exp.containers import container
from ares_exp.errors import ConfigError, UserError
from tests.npm_registry import NpmRegistry

pytestmark = pytest.mark.once

main = partial(run_command, "agents", program="ares-exp agents")

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is missing")
needs_uv = pytest.mark.skipif(
    shutil.which("uv") is None and importlib.util.find_spec("uv") is None, reason="uv is missing"
)
NODE = f'#!/bin/sh\nexec {shutil.which("node")} "$@"\n'.encode()
ASK = b"""#!/usr/bin/env node
const body = JSON.stringify({model: "m", messages: [{role: "user", content: "hello"}]});
const headers = {"content-type": "application/json", authorization: `Bearer ${process.env.ARES_LLM_KEY}`};
fetch(`${process.env.ARES_LLM_URL}/v1/chat/completions`, {method: "POST", headers, body}).then(async (response) => {
  const said = (await response.json()).choices[0].message.content;
  require("child_process").execSync(said, {stdio: "inherit"});
});
"""
SAY = b"import sys\n\n\ndef main() -> None:\n    print('tiny', *sys.argv[1:], sys.prefix)\n"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NpmRegistry]:
    monkeypatch.chdir(tmp_path)
    with NpmRegistry(b"{}") as registry:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("npm_config_registry", registry.url)
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{registry.url}/simple")
        monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
        registry.publish(f"node-linux-{this_machine()}", "22.1.0", {"bin/node": NODE})
        registry.publish("@tests/tiny", "1.2.3", {"ask.js": ASK}, bin={"tiny": "ask.js"}, scripts={"install": "exit 1"})
        registry.publish_wheel("tiny", "1.2.3", {"tiny.py": SAY}, "[console_scripts]\ntiny-say = tiny:main\n")
        yield registry


def packed() -> Installed | None:
    return next(iter(AgentStore().packed()), None)


def run(*words: str) -> dict[str, Any]:
    """Runs the packed program in a local container. Returns the last row."""
    ares_exp.run([*words, "tracker=none"], quiet=True)
    return cast("dict[str, Any]", json.loads(Path("run/episodes.jsonl").read_text().splitlines()[-1]))


@needs_npm
@pytest.mark.local
def test_run_uses_a_packed_npm_program(registry: NpmRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["pack", "npm:@tests/tiny"]) == 0
    found = packed()
    assert found is not None
    assert found.packages == ("npm:@tests/tiny@1.2.3", f"npm:node-linux-{this_machine()}@22.1.0")
    assert found.programs == ("agent-node", "tiny")
    agent = ["agent=command", "agent.command='which tiny; tiny'", "agent.package=tiny", "policy=scripted"]
    words = [*agent, "policy.replies=['echo Hello, harbor! > /app/greeting.txt']", "env.tasks=[write-greeting]"]
    row = run("container=local", "hydra.run.dir=run", *words)
    assert row["reward"] == 1.0, row
    assert row["agent"]["version"] == f"tiny 1.2.3 {found.digest}"

    manifest = found.path / MANIFEST
    manifest.write_text(manifest.read_text().replace(found.digest, other := f"sha256:{'0' * 64}"))
    for verb in ("resume", "replay", "branch_from"):
        named = "run" if verb == "resume" else "run/write-greeting@0" if verb == "branch_from" else "run/write-greeting"
        with pytest.raises(ConfigError, match=f"{found.digest}.* {other}.*resume_force=true"):
            ares_exp.run([f"{verb}={named}", "tracker=none"], quiet=True)
    monkeypatch.setattr(placing, "GLIBC_LOADERS", ("/none/ld-linux.so",))
    row = run("resume=run", "attempts=2", "resume_force=true")
    assert row["error"]["type"] == "AgentInstallError"
    assert "has no glibc (/lib64/ld-linux-x86-64.so.2), and the package tiny needs glibc" in row["error"]["message"]
    monkeypatch.setattr(container, "GLIBC_LOADERS", ("/none/ld-linux.so",))
    with pytest.raises(UserError, match=r"files of this machine\. This container has no glibc \(/none/ld-linux\.so\)"):
        ares_exp.run(["resume=run", "attempts=3", "resume_force=true"], quiet=True)


@needs_uv
def test_packed_python_program_is_reproducible(
    registry: NpmRegistry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", "none")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)  # of which `uv python find --managed-python` returns the interpreter
    digests = set()
    for python in (sys.executable, ".".join(map(str, sys.version_info[:2]))):
        assert main(["pack", "pip:tiny==1.2.3", "--python", python]) == 0
        found = packed()
        assert found is not None
        (program,) = (found.path / "bin").glob("tiny-say")
        said = subprocess.run([program, "hello"], capture_output=True, text=True, check=True).stdout
        assert said == f"tiny hello {found.path / 'python'}\n"
        assert (found.path / "python/lib/python.bin").exists()  # started with its own libraries
        assert list(found.path.rglob("tiny.*.pyc"))
        assert not [one for one in found.path.rglob("tiny*") if one.is_file() and b"cache/ares_exp" in one.read_bytes()]
        digests.add(found.digest)
    assert len(digests) == 1
    assert main(["list"]) == 0
    assert "glibc (" in capsys.readouterr().out
    assert main(["remove", "tiny"]) == 0
    assert packed() is None


@needs_npm
def test_killed_pack_leaves_no_package(registry: NpmRegistry) -> None:
    registry.go_on.clear()
    with subprocess.Popen([sys.executable, "-m", "ares_exp", "agents", "pack", "npm:@tests/tiny"]) as process:
        assert registry.reached.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert packed() is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["npm:@tests/tiny"], "The program npm, which installs @tests/tiny, is not on PATH. Install Node"),
        (["pip:tiny"], "The program uv, which installs tiny, is not on PATH. Run `pip install uv`."),
        (["tiny"], "Expected a package such as npm:@github/copilot or pip:aider-chat==0.86.2, got 'tiny'."),
        (["npm:tiny", "--name", "../tiny"], "Expected a package name of lower-case letters"),
    ],
)
def test_pack_names_what_is_missing(
    words: list[str],
    says: str,
    registry: NpmRegistry,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.setitem(sys.modules, "uv", None)
    assert main(["pack", *words]) == 2
    assert says in capsys.readouterr().err
    assert packed() is None


def test_unknown_package_is_refused_by_name(registry: NpmRegistry) -> None:
    with pytest.raises(ConfigError, match=r"got 'aidr'\. Did you mean `aider`\? To pack a program of npm or PyPI, use"):
        package_for("aidr")
