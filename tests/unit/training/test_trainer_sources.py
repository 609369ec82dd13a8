"""Fields of trainers and the places that read them, in the sources of the installed packages, without importing them.

Run it with the packages on the path: `pip install --no-deps verl==0.9.1 skyrl==0.4.0 trl==1.16.0`, and a checkout of
slime 0.3.1.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.training.trainer_types import AgentLoopOutput, GeneratorOutput, Sample

pytestmark = [pytest.mark.nightly, pytest.mark.once]


def nodes(module: str) -> Iterator[ast.AST]:
    """The nodes of a module, or of all modules of a folder."""
    package, _, path = module.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    for folder in map(Path, spec.submodule_search_locations or ()):
        place = folder / path
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield from ast.walk(ast.parse(file.read_text()))


def fields(module: str, name: str) -> set[str]:
    """The annotated fields of a class."""
    classes = (node for node in nodes(module) if isinstance(node, ast.ClassDef) and node.name == name)
    return {ast.unparse(line.target) for line in next(classes).body if isinstance(line, ast.AnnAssign)}


def parameters(module: str, name: str) -> set[str]:
    """The parameters of a class or a method; of all with this name."""
    functions = (node for node in nodes(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    found = [one.args for one in functions if one.name == name]
    return {argument.arg for one in found for argument in (*one.args, *one.kwonlyargs)}


def is_named(node: ast.expr, name: str) -> bool:
    """Whether a node is a variable or an attribute with this name."""
    return name in (getattr(node, "id", None), getattr(node, "attr", None))


def reads(module: str, name: str) -> set[str]:
    """The keys that are read of a variable or an attribute with this name."""
    found = set()
    for node in nodes(module):
        match node:
            case ast.Subscript(value=value, slice=ast.Constant(str(key)), ctx=ast.Load()):
                pass
            case ast.Call(func=ast.Attribute(value=value, attr="get" | "pop"), args=[ast.Constant(str(key)), *_]):
                pass
            case _:
                continue
        if is_named(value, name):
            found.add(key)
    return found


def uses(module: str, name: str) -> set[str]:
    """The attributes that are used of a variable or an attribute with this name."""
    attributes = (node for node in nodes(module) if isinstance(node, ast.Attribute))
    return {
        one.attr for one in attributes if name in (getattr(one.value, "id", None), getattr(one.value, "attr", None))
    }


def keywords(module: str, called: str) -> set[str]:
    """The keyword arguments of the calls of a function."""
    calls = (node for node in nodes(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == called)
    return {str(keyword.arg) for call in calls for keyword in call.keywords}


V1, LOOP, SERVER = "verl/trainer/ppo/v1", "verl/experimental/agent_loop/agent_loop.py", "verl/workers/rollout"
GENERATORS, ENGINE = "skyrl/train/generators", "skyrl/backends/skyrl_train/inference_servers/base.py"
HARNESS = "trl/experimental/async_grpo/openenv_harness.py"
BUILT_WITH = {
    "config", "trainer_config", "server_manager", "tokenizer", "processor", "hf_model_type", "dataset_cls",
    "data_config", "tools",
}  # fmt: skip

SPECULATION = {"spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps"}
NOT_READ = {"stop_reasons", "env_metrics", "trajectory_time_splits"}

CASES: list[tuple[Callable[[str, str], set[str]], str, str, set[str]]] = [
    (fields, LOOP, "AgentLoopOutput", set(AgentLoopOutput.model_fields)),
    (keywords, LOOP, "hydra.utils.instantiate", BUILT_WITH),
    (uses, LOOP, "agent_loop", {"run"}),
    (
        reads, V1, "tag",
        {"is_prompt", "global_steps", "status", "seq_len", "is_padding", "min_global_steps", "max_global_steps"},
    ),
    (reads, V1, "extra_fields", {"reward_extra_info"}),
    (reads, V1, "extra_field", SPECULATION | {"reward_extra_info"}),
    (
        fields, f"{SERVER}/replica.py", "TokenOutput",
        {"token_ids", "log_probs", "routed_experts", "stop_reason", "num_preempted", "extra_fields"},
    ),
    (fields, f"{GENERATORS}/base.py", "GeneratorOutput", set(GeneratorOutput.__annotations__)),
    (
        fields, f"{GENERATORS}/base.py", "GeneratorInput",
        {"prompts", "env_classes", "env_extras", "sampling_params", "trajectory_ids", "batch_metadata"},
    ),
    (parameters, ENGINE, "finish_session", {"self", "session_id"}),
    (parameters, ENGINE, "get_endpoint_url", {"self"}),
    (reads, "skyrl/train", "generator_output", set(GeneratorOutput.__annotations__) - NOT_READ),
    (uses, HARNESS, "session", {"verify", "close"}),
    (uses, HARNESS, "loop_session", {"wait_for_completion", "fetch_training_trace"}),
    (uses, HARNESS, "_factory", {"create"}),
    (keywords, HARNESS, "self._factory.create", {"seed", "episode_id"}),
    (keywords, HARNESS, "harness_session_factory", {"sampling"}),
    (fields, "slime/utils/types.py", "Sample", set(Sample.__dataclass_fields__)),
    (keywords, "slime/rollout/sglang_rollout.py", "custom_generate_func", {"evaluation"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("extract", "module", "name", "expected"),
    [pytest.param(*case, marks=pytest.mark.train(case[1].partition("/")[0])) for case in CASES],
)
def test_the_sources_of_trainers_are_as_expected(
    extract: Callable[[str, str], set[str]], module: str, name: str, expected: set[str]
) -> None:
    assert extract(module, name) == expected
