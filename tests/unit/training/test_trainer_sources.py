"""Fields of trainers and the places that read them, and the recipes for trainers, against the sources of the trainers.

The wheels are installed for these tests without their dependencies, and nothing is imported. slime and rLLM are not on
PyPI: their cases need a checkout on the path, as in `nightly.yml`.
"""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.training.trainer_types import AgentLoopOutput, GeneratorOutput, Sample

pytestmark = [pytest.mark.nightly, pytest.mark.once]
WHEELS = {
    "areal==1.0.4": "7d7cfab10d9ec0990d9263290a9472366827783b9ad5fce22f56a1add416bdd9",
    "nemo-gym==0.4.0": "955f08027a2f01a1c6e0e3c5da0820c330fee0307754d59ba2517f5ad89cea6e",
    "openenv==0.10.0": "5e0a1019253802551de7890f7638c977c4a36540a4b19f01e5a6fcdb5f5fd135",
    "skyrl==0.4.0": "7f95dad660ddc388ca135a1faf61bcbd8010a39e3d4fef92c62959c0353c6ee9",
    "tinker-cookbook==0.6.1": "48a17bbfcde996c21e00fb90fd8f7f434d1456581b79b34550fca9c0cbd8c0fc",
    "trl==1.16.0": "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    "verl==0.9.1": "db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14",
}
"""With their SHA-256. The cache of pip or uv keeps them."""
RECIPES = Path(__file__).parents[3] / "docs" / "recipes.md"


@pytest.fixture(scope="module", autouse=True)
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("wheels")
    (folder / "wheels.txt").write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in WHEELS.items()))
    uv = shutil.which("uv")
    if importlib.util.find_spec("pip") is None and uv is None:
        pytest.skip("neither pip nor uv is to be had here")
    install = [sys.executable, "-m", "pip"] if uv is None else [uv, "pip"]
    install += ["install", "-q", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--python-version", "3.12"]
    install += ["--target", str(folder / "site"), "-r", str(folder / "wheels.txt")]
    subprocess.run(install, check=True, timeout=250)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        yield


def nodes(module: str) -> Iterator[ast.AST]:
    package, _, path = module.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    for folder in map(Path, spec.submodule_search_locations or ()):
        place = folder / path
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield from ast.walk(ast.parse(file.read_text()))


def fields(module: str, name: str) -> set[str]:
    classes = (node for node in nodes(module) if isinstance(node, ast.ClassDef) and node.name == name)
    return {ast.unparse(line.target) for line in next(classes).body if isinstance(line, ast.AnnAssign)}


def parameters(module: str, name: str) -> set[str]:
    functions = (node for node in nodes(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    found = [one.args for one in functions if one.name == name]
    return {argument.arg for one in found for argument in (*one.args, *one.kwonlyargs)}


def is_named(node: ast.expr, name: str) -> bool:
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
    attributes = (node for node in nodes(module) if isinstance(node, ast.Attribute))
    return {
        one.attr for one in attributes if name in (getattr(one.value, "id", None), getattr(one.value, "attr", None))
    }


def keywords(module: str, called: str) -> set[str]:
    calls = (node for node in nodes(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == called)
    return {str(keyword.arg) for call in calls for keyword in call.keywords}


def keys(module: str, name: str) -> set[str]:
    values = (node.value for node in nodes(module) if isinstance(node, ast.Assign) and is_named(node.targets[0], name))
    return {str(ast.literal_eval(key)) for one in values if isinstance(one, ast.Dict) for key in one.keys if key}


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
    (keys, "areal/experimental/openai/proxy/workflow.py", "extra_kwargs", {"base_url", "http_client", "api_key"}),
    (fields, "slime/utils/types.py", "Sample", set(Sample.__dataclass_fields__)),
    (keywords, "slime/rollout/sglang_rollout.py", "custom_generate_func", {"evaluation"}),
]  # fmt: skip


@pytest.mark.parametrize(("extract", "module", "name", "expected"), CASES)
def test_the_sources_of_trainers_are_as_expected(
    extract: Callable[[str, str], set[str]], module: str, name: str, expected: set[str]
) -> None:
    assert extract(module, name) == expected


def programs() -> Iterator[tuple[str, ast.Module]]:
    """The programs of the page that import from a trainer, with its package."""
    for code in re.findall(r"```py\n(# file: .*?)```", RECIPES.read_text(), re.DOTALL):
        if (found := re.search(r"^from (rllm|tinker_cookbook|nemo_gym)\b", code, re.MULTILINE)) is not None:
            yield found[1], ast.parse(code)


class Imported:
    """A class or function that a program imports."""

    def __init__(self, module: str, name: str) -> None:
        package = module.partition(".")[0]
        tree = next(one for one in nodes(module.replace(".", "/") + ".py") if isinstance(one, ast.Module))
        defined = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef | ast.FunctionDef)}
        origins = {
            alias.name: str(one.module) for one in tree.body if isinstance(one, ast.ImportFrom) for alias in one.names
        }
        aliases = {ast.unparse(one.target) for one in tree.body if isinstance(one, ast.AnnAssign)}
        assert name in {*defined, *origins, *aliases}, f"{module} has no {name}"
        found = defined.get(name)
        self.node = found if isinstance(found, ast.ClassDef) else None
        self.bases = []
        self.is_known = self.node is not None
        for base in map(ast.unparse, self.node.bases if self.node is not None else ()):
            of = module if base in defined else origins.get(base, "")
            if of.partition(".")[0] == package:
                self.bases.append(Imported(of, base))
            else:
                self.is_known &= base in ("ABC", "BaseModel", "TypedDict")
        self.is_known &= all(base.is_known for base in self.bases)

    def fields(self) -> dict[str, bool]:
        assert self.node is not None
        own = {
            ast.unparse(one.target): one.value is not None for one in self.node.body if isinstance(one, ast.AnnAssign)
        }
        return {name: has for base in self.bases for name, has in base.fields().items()} | own

    def methods(self) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        body = self.node.body if self.node is not None else ()
        own = {one.name: one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        return {name: one for base in self.bases for name, one in base.methods().items()} | own


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[bool, list[str]]:
    arguments = [*node.args.args, *node.args.kwonlyargs]
    return isinstance(node, ast.AsyncFunctionDef), [one.arg for one in arguments]


@pytest.mark.parametrize(("package", "program"), [*programs()])
def test_recipes_fit_the_sources_of_trainers(package: str, program: ast.Module) -> None:
    imported = {
        alias.name: Imported(str(node.module), alias.name)
        for node in program.body
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == package
        for alias in node.names
    }
    for node in ast.walk(program):
        if isinstance(node, ast.ClassDef):
            own = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
            for base in (imported[ast.unparse(one)] for one in node.bases):
                for name, method in base.methods().items():
                    assert name in own or "abstractmethod" not in map(ast.unparse, method.decorator_list), name
                    assert name not in own or signature(own[name]) == signature(method), name
        if isinstance(node, ast.Call) and (called := imported.get(ast.unparse(node.func))) and called.is_known:
            given = {*list(called.fields())[: len(node.args)], *(str(one.arg) for one in node.keywords)}
            assert given <= set(called.fields()), ast.unparse(node)
            assert {name for name, has in called.fields().items() if not has} <= given, ast.unparse(node)
