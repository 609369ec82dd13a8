"""No object of ours is asked by a literal name: what it has is in a contract that the type checker reads."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
PACKAGE = Path(__file__).parents[2] / "ares_exp"

FOREIGN = {
    "config/explain.py": {"full_key"},  # an error of omegaconf's
    "containers/daytona/failures.py": {"status_code"},  # an error of the SDK's
    "containers/docker/container_lifetime.py": {"status_code"},  # an error of docker-py's
    "containers/docker/engine.py": {"explanation"},  # likewise
    "containers/egress_proxy.py": {"ipv4_mapped"},  # an address of the standard library
    "containers/filesystem/stored_objects.py": {"compressor"},  # a threading.local
    "agents/runtime/agent_runtime.py": {"args", "__qualname__"},  # a function or a partial of the agent's
    "agents/runtime/virtual_clock.py": {"__self__"},  # a function of `random`
    "records/run_dir.py": {"CSafeLoader"},  # of PyYAML, where it was built with it
    "records/secrets.py": {"_data"},  # of os.environ
    "records/terminal_text.py": {"encoding"},  # a stream
    "training/skyrl.py": {"instance_id"},  # a trajectory id of SkyRL
    "wrappers/chat_text.py": {"messages", "system_prompt"},  # an observation of any environment's
    "wrappers/spaces.py": {"messages"},  # likewise
}
"""Who asks what of objects that are not ours."""


def asked(tree: ast.Module) -> set[str]:
    """The literal names in calls of `getattr` and `hasattr`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1]
    names = [call.args[1] for call in calls if ast.unparse(call.func) in ("getattr", "hasattr")]
    return {name.value for name in names if isinstance(name, ast.Constant)}


def test_package_objects_are_not_queried_by_literal_names() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): asked(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == FOREIGN
