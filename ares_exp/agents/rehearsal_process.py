"""Running an agent again in new processes, in which strings have other hashes and objects other addresses.

Also the program of these processes: `python -m ares_exp.agents.rehearsal_process` reads a job from its standard input.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ares_exp import errors
from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.agents.rehearsal import Recording, run_again
from ares_exp.containers.cancellation import finish
from ares_exp.errors import AgentError, AresExpError

HASH_SEEDS = ("1", "2")


@dataclass(frozen=True, slots=True)
class FactoryRecipe:
    """How to make an agent factory in another process.

    Attributes:
        module: Where its class or function is.
        file: The module's file, for one that cannot be imported by its name.
        name: The class or function in it.
        options: What to make an instance with; `None` for a class or function that is the factory itself.
    """

    module: str
    file: str | None
    name: str
    options: Mapping[str, Any] | None

    @classmethod
    def of(cls, factory: CodeAgentFactory) -> FactoryRecipe:
        """The recipe of a factory.

        Raises:
            ValueError: There is none.
        """
        kind = _kind_of(factory)
        if "<" in kind.__qualname__ or kind.__module__ == "__main__":
            raise ValueError(
                f"Expected a factory that a new process can import, got {kind.__module__}.{kind.__qualname__}. Define "
                "it at the top of a module, or leave the new processes out with `in_new_process=False`."
            )
        options = None if kind is factory else dict(getattr(factory, "options", None) or {})
        return cls(kind.__module__, getattr(inspect.getmodule(kind), "__file__", None), kind.__qualname__, options)

    def make(self) -> CodeAgentFactory:
        """The factory."""
        found: Any = self._load()
        for part in self.name.split("."):
            found = getattr(found, part)
        made: CodeAgentFactory = found if self.options is None else found(**self.options)
        return made

    def _load(self) -> object:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError:
            if self.file is None:
                raise
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def package_of(factory: CodeAgentFactory) -> str:
    """The top-level package that a factory is in."""
    return str(_kind_of(factory).__module__).partition(".")[0]


def _kind_of(factory: CodeAgentFactory) -> Any:
    return factory if inspect.isfunction(factory) or inspect.isclass(factory) else type(factory)


async def run_again_in_new_processes(recipe: FactoryRecipe, recording: Recording, *, timeout_sec: float) -> None:
    """Runs the agent again up to each step, in one process for each of `HASH_SEEDS`.

    Args:
        recipe: Makes the agent's factory.
        recording: What it has to do.
        timeout_sec: Bound on a process, seconds.

    Raises:
        JournalError: It did something else.
        AgentError: The process failed.
    """
    job = json.dumps({"recipe": asdict(recipe), "recording": recording.to_dict(), "path": sys.path}).encode()
    checks = (_in_process(job, hash_seed, timeout_sec) for hash_seed in HASH_SEEDS)
    for error in await asyncio.gather(*checks):
        if error is not None:
            raise error


async def _in_process(job: bytes, hash_seed: str, timeout_sec: float) -> AresExpError | None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
    )
    try:
        async with asyncio.timeout(timeout_sec):
            output, complaints = await process.communicate(job)
    except TimeoutError:
        return AgentError(f"The agent, run again in a new process, did not come to its end within {timeout_sec:g} s.")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await finish(process.wait())
    if process.returncode != 0:
        return AgentError(f"The agent could not be run again in a new process: {complaints.decode(errors='replace')}")
    found = json.loads(output)
    kind = getattr(errors, found["kind"]) if found else None
    return kind(f"{found['message']} (In a new process, with PYTHONHASHSEED={hash_seed}.)") if kind else None


async def _main() -> AresExpError | None:
    job = json.load(sys.stdin)
    sys.path[:] = job["path"]
    recipe, recording = FactoryRecipe(**job["recipe"]), Recording.from_dict(job["recording"])
    factory = recipe.make()
    for step in range(len(recording.steps)):
        try:
            await run_again(factory, recording, step, package=package_of(factory))
        except AresExpError as error:
            return error
    return None


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the agent prints
    failure = asyncio.run(_main())
    with answer:
        json.dump(None if failure is None else {"kind": type(failure).__name__, "message": str(failure)}, answer)
