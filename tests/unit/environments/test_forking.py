"""`fork()`: what the branches say of where they come from, and what is refused."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.errors import ConfigError
from ares_exp.llms.response import LLMResponse
from tests.unit.environments.conftest import MakeEnvironment

pytestmark = pytest.mark.local

LOOK = LLMResponse.from_text("```bash\npwd\n```")


async def test_forks_of_two_forks_have_the_same_root_and_other_parents(make_environment: MakeEnvironment) -> None:
    async with AsyncExitStack() as entered:

        async def forked(env: CodeEnvironment, n: int) -> list[CodeEnvironment]:
            return [await entered.enter_async_context(fork) for fork in await env.fork(n)]

        env = make_environment()
        await env.reset()
        forks = await forked(env, 2)
        for fork in forks:
            await fork.step(LOOK)
        below = [one for fork in forks for one in await forked(fork, 1)]

        [first, second] = [fork.lineage for fork in forks]
        assert (first["root"], first["parent"], first["step"]) == (second["root"], second["parent"], second["step"])
        assert [fork.lineage["branch"] for fork in forks] == [0, 1]
        assert {one.lineage["root"] for one in below} == {first["root"]}
        assert len({first["parent"], *(one.lineage["parent"] for one in below)}) == 3
        assert [one.lineage["step"] for one in below] == [1, 1]


async def test_less_than_one_fork_is_refused(make_environment: MakeEnvironment) -> None:
    env = make_environment()
    await env.reset()
    with pytest.raises(ConfigError, match="at least 1 environment, got 0"):
        await env.fork(0)
