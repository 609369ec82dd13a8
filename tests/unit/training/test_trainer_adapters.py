"""The adapters of trainers, with a real service. The trainers are their types, or installed packages."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from ares_exp.errors import ServiceError
from ares_exp.training.client import BlockingClient, Client
from ares_exp.training.openenv import EpisodeSessions
from ares_exp.training.skyrl import EpisodeGenerator
from ares_exp.training.slime import generate
from tests.loopback_endpoint import LoopbackEndpoint, error
from tests.service_contract import Held, served, until
from tests.tiny_model import tiny_tokenizer
from tests.token_engine import TokenEngine
from tests.unit.training.counted_tasks import OPEN, options
from tests.unit.training.trainer_types import AgentLoopOutput, GeneratorOutput, Sample, check_generator_output

TASK = "apple"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    options(tmp_path / "options")
    OPEN.mkdir()
    yield
    assert list(OPEN.iterdir()) == []


@pytest.fixture
def endpoint() -> Iterator[LoopbackEndpoint]:
    with LoopbackEndpoint(otherwise=TokenEngine(["yes"])) as endpoint:
        yield endpoint


@asynccontextmanager
async def service(*overrides: str) -> AsyncIterator[str]:
    async with served(overrides) as caller:
        yield caller.url


def policy_of(endpoint: LoopbackEndpoint) -> dict[str, Any]:
    return {"base_url": endpoint.url, "model": "m", "sampling": {"temperature": 1.0}}


async def test_client_returns_the_rows_of_submitted_rollouts(endpoint: LoopbackEndpoint) -> None:
    async with service() as url, Client(url) as client:
        assert [task.name async for task in client.tasks()] == ["apple", "bread", "cider"]
        episodes = await client.run(["bread", TASK], 2, policy=policy_of(endpoint), group_id="g")
        assert [episode.task for episode in episodes] == ["bread", "bread", TASK, TASK]
        assert {(episode.state, episode.reward, episode.group_id) for episode in episodes} == {("finished", 1.0, "g")}
        assert [episode.report.made for episode in episodes] == [{"clean": 1}] * 4
        info = await client.info()
        assert (info.capacity.running, info.unacknowledged) == (0, 0)


async def test_client_pauses_and_announces_versions(endpoint: LoopbackEndpoint) -> None:
    async with service() as url, Client(url) as client:
        assert (await client.versions("17")).version == "17"
        assert "requests" in (await client.pause(for_sec=60.0)).paused
        submitted = await client.submit([TASK], policy=policy_of(endpoint))
        await until(lambda: list(OPEN.iterdir()))
        assert (endpoint.requests, (await client.state()).in_flight) == ([], 0)
        assert (await client.resume()).paused == {}
        [episode] = await client.collect(submitted)
        assert (episode.state, episode.versions) == ("finished", ["step-7"])
        with pytest.raises(
            ServiceError, match="no longer has the episodes of 1 rollouts that were acknowledged before"
        ):
            await client.collect(submitted)


async def test_cancelled_run_cancels_its_rollouts(endpoint: LoopbackEndpoint) -> None:
    endpoint.otherwise = Held()
    async with service() as url, Client(url) as client:
        running = asyncio.create_task(client.run([TASK], 2, policy=policy_of(endpoint)))
        await until(lambda: len(list(OPEN.iterdir())) == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ((await client.info()).unacknowledged, list(OPEN.iterdir())) == (0, [])


async def test_run_cancelled_while_submitting_cancels_its_rollouts(
    endpoint: LoopbackEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.otherwise, accepted, call = Held(), asyncio.Event(), Client._call

    async def slow(*arguments: Any, **more: Any) -> Any:
        response = await call(*arguments, **more)
        accepted.set()
        await asyncio.sleep(0.2)
        return response

    async with service() as url, Client(url) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Client, "_call", slow)
            running = asyncio.create_task(client.run([TASK], 2, policy=policy_of(endpoint)))
            await accepted.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert ((await client.info()).unacknowledged, list(OPEN.iterdir())) == (0, [])


async def test_blocking_client_has_the_methods_of_the_client(endpoint: LoopbackEndpoint) -> None:
    def work(url: str) -> None:
        with BlockingClient(url) as client:
            submitted = client.submit([TASK], 2, policy=policy_of(endpoint))
            assert {one.rollout_id for one in client.episodes(submitted)} == set(submitted.rollout_ids)
            with pytest.raises(ServiceError, match="returned 404"):
                client.status("r9")

    async with service() as url:
        await asyncio.to_thread(work, url)


async def test_sessions_of_openenv_have_traces_and_rewards(endpoint: LoopbackEndpoint) -> None:
    harness = pytest.importorskip("openenv.core.harness")

    def work(url: str) -> None:
        sessions = EpisodeSessions(url, policy=policy_of(endpoint), sampling={"temperature": 1.0, "top_k": 0})
        first = sessions.create([{"role": "user", "content": TASK}], seed=3, episode_id="e1")
        assert isinstance(first, harness.TrainableSession)
        assert (first.initial_messages(), first.list_tools(), first.wait_for_completion()) == ([], [], 0)
        one, two = first.fetch_training_trace().turns
        assert two.prompt_token_ids[: len(one.prompt_token_ids)] == one.prompt_token_ids
        assert sum(one.loss_mask) == len(one.completion_token_ids) == len(one.per_token_logps) > 0
        assert first.verify([]).env_reward == 1.0
        first.close()
        first.close()

        endpoint.then(error(400, "wrong"))
        failed = sessions.create(TASK)
        assert (failed.wait_for_completion(), failed.fetch_training_trace().turns) == (1, [])
        assert failed.verify([]).env_reward is None
        failed.close()

        endpoint.then(Held())
        late = sessions.create(TASK)
        with pytest.raises(TimeoutError):
            late.wait_for_completion(timeout_s=0.01)
        assert (late.verify([]).env_reward, late.verify([]).metrics["state"]) == (None, "cancelled")
        late.close()
        endpoint.then(Held())
        stopped = sessions.create(TASK)
        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(stopped.wait_for_completion)
            stopped.close()
            assert ending.result(60) == 1

    async with service() as url:
        await asyncio.to_thread(work, url)


class Servers:
    """The server manager of verl: each response ends the turn, with the version of the trainer's step."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.rollouts: set[str] = set()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        assert (sampling_params["temperature"], sampling_params["logprobs"]) == (1.0, True)
        self.rollouts.add(request_id)
        ids = [*self._tokenizer("yes", add_special_tokens=False).input_ids, self._tokenizer.eos_token_id]
        steps = {"min_global_steps": 16, "max_global_steps": 17}
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed", extra_fields=steps)


@pytest.mark.train("torch", "transformers")
@pytest.mark.parametrize("lost", ["mask", "group"])
async def test_agent_loop_of_verl_samples_the_episode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str
) -> None:
    module = ModuleType("verl.experimental.agent_loop.agent_loop")
    module.AgentLoopOutput = AgentLoopOutput  # type: ignore[attr-defined]
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    servers = Servers(tokenizer)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    async with service() as url:
        config = OmegaConf.create(
            {
                "_target_": "ares_exp.training.verl.EpisodeAgentLoop",
                "url": url,
                "model": str(tmp_path / "model"),
                "lost": lost,
                "submission": {"limits": {"steps": 9}},
            }
        )
        loop = instantiate(config, trainer_config=None, server_manager=servers, tokenizer=tokenizer, tools=[])
        outputs = await loop.run(params, task=TASK, global_steps=18, agent_name="ares_exp")
    assert {output.reward_score for output in outputs} == {1.0}
    assert {output.extra_fields["min_global_steps"] for output in outputs} == {16}
    assert {output.extra_fields["max_global_steps"] for output in outputs} == {17}
    assert sum(sum(output.response_mask) for output in outputs) == 2 * len(tokenizer("yes").input_ids) + 2
    assert len(servers.rollouts) == 1


class Engine:
    """The inference client of SkyRL, as far as a generator uses it."""

    def __init__(self, endpoint: LoopbackEndpoint) -> None:
        self._endpoint = endpoint
        self.finished: list[str] = []

    def get_endpoint_url(self) -> str:
        return self._endpoint.url.removesuffix("/v1")

    async def finish_session(self, session_id: str) -> None:
        self.finished.append(session_id)


async def test_generator_of_skyrl_runs_the_batch(endpoint: LoopbackEndpoint) -> None:
    engine = Engine(endpoint)
    batch = {
        "env_extras": [{"task": TASK}, {"task": "bread"}, {"task": "bread"}],
        "sampling_params": {"temperature": 1.0, "max_tokens": 9, "logprobs": 0, "stop": None},
        "trajectory_ids": [SimpleNamespace(instance_id=name) for name in "abb"],
    }
    async with service("concurrency=1") as url:
        endpoint.then(error(400, "wrong"))
        generator = EpisodeGenerator(url, engine, model="m")
        output: GeneratorOutput = TypeAdapter(GeneratorOutput).validate_python(
            await generator.generate(batch), strict=True
        )
    check_generator_output(output, prompts=3)
    lost = output["rewards"].index(0.0)
    masked = {"a"} if lost == 0 else {"b"}
    ids = [one.instance_id for one in batch["trajectory_ids"]]
    assert [not any(mask) for mask in output["loss_masks"]] == [name in masked for name in ids]
    assert sorted(engine.finished) == sorted({one.headers["x-session-id"] for one in endpoint.requests})


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch, endpoint: LoopbackEndpoint) -> SimpleNamespace:
    """slime's state, which its generate function imports; and its arguments."""
    state = SimpleNamespace(aborted=False)
    module = ModuleType("slime.rollout.sglang_rollout")
    module.GenerateState = lambda args: state  # type: ignore[attr-defined]
    for name in ("slime", "slime.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    host, port = endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    args = SimpleNamespace(sglang_router_ip=host, sglang_router_port=port, ares_exp={})
    return SimpleNamespace(state=state, args=args)


PARAMS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 9, "no_stop_trim": True, "stop": None}


async def test_generate_function_of_slime_returns_samples(endpoint: LoopbackEndpoint, slime: SimpleNamespace) -> None:
    sample = Sample(index=5, metadata={"task": TASK})
    async with service() as url:
        slime.args.ares_exp = {"url": url}
        [made] = await generate(slime.args, sample, dict(PARAMS))
        endpoint.then(error(400, "wrong"))
        [failed] = await generate(slime.args, sample, dict(PARAMS))
    assert (made.reward, made.status, made.rollout_id, made.remove_sample) == (1.0, Sample.Status.COMPLETED, 5, False)
    assert len(made.loss_mask) == len(made.rollout_log_probs) == made.response_length < len(made.tokens)
    assert (made.weight_versions, sum(made.loss_mask) > 0, sample.tokens) == (["step-7"], True, [])
    assert (failed.reward, failed.status, failed.remove_sample) == (0.0, Sample.Status.ABORTED, True)
    assert len(failed.loss_mask) == failed.response_length > sum(failed.loss_mask) == 0
    assert "no_stop_trim" not in endpoint.requests[0].body


async def test_generate_function_of_slime_ends_when_slime_aborts(
    endpoint: LoopbackEndpoint, slime: SimpleNamespace
) -> None:
    endpoint.otherwise = Held()
    async with service() as url:
        slime.args.ares_exp = {"url": url}
        running = asyncio.create_task(generate(slime.args, Sample(index=5, metadata={"task": TASK}), dict(PARAMS)))
        await until(lambda: list(OPEN.iterdir()))
        slime.state.aborted = True
        [aborted] = await running
        assert (aborted.status, list(OPEN.iterdir())) == (Sample.Status.ABORTED, [])
