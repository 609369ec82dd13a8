"""The policy of a model in this process, on a tiny model with random weights."""

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import ConfigError, ContextOverflowError, PolicyError, PreflightError, UnsendableRequestError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData
from ares_exp.policies.in_process.activations import ForwardPass, read_activations
from ares_exp.policies.policy import EpisodeSpec, UpdatablePolicy
from ares_exp.policies.transformers_policy import TransformersPolicy
from ares_exp.testing.policy_contract import PolicyContract
from tests.tiny_model import HERMES, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.train

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """A policy that no test changes."""
    return tiny_model(tokenizer)


@pytest.fixture
async def policy(model: Any, tokenizer: Any) -> AsyncIterator[TransformersPolicy]:
    made = TransformersPolicy.of(model, tokenizer, max_output_tokens=8)
    yield made
    await made.close()


def ask(*texts: str, **more: Any) -> LLMRequest:
    roles = ("user", "assistant")
    return LLMRequest([{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)], **more)


def episode(number: int = 0) -> EpisodeSpec:
    return EpisodeSpec("task", number, seed=number)


def recomputed(model: Any, response: LLMResponse, temperature: float = 1.0) -> list[float]:
    """The log-probabilities of a response's tokens, by one forward pass without a cache."""
    import torch

    prompt, ids = list(response.prompt_token_ids or ()), list(response.completion_token_ids or ())
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0].float() / temperature
    after = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 :]
    return [after[n, token].item() for n, token in enumerate(ids)]


class TestTransformers(PolicyContract):
    @pytest.fixture
    def policy(self, model: Any, tokenizer: Any) -> LLMClient:
        return TransformersPolicy.of(model, tokenizer, max_output_tokens=8)


async def test_tokens_and_logprobs_match_the_model(policy: TransformersPolicy, model: Any) -> None:
    """Concurrent requests with prompts of different lengths, each at a separate temperature."""
    requests = [ask("x" * (10 * n), temperature=1.0 + n / 2) for n in range(1, 5)]
    responses = await asyncio.gather(*(policy.for_episode(episode(n))(one) for n, one in enumerate(requests)))
    for request, response in zip(requests, responses, strict=True):
        assert response.logprobs == pytest.approx(recomputed(model, response, request.temperature or 1.0), abs=1e-4)
        assert response.usage.generated_tokens == len(response.completion_token_ids or ()) > 0
        assert response.sampling["temperature"] == request.temperature
    seeds = [response.sampling["seed"] for response in responses if response.sampling]
    assert seeds == [0, 1, 2, 3]


async def test_samples_depend_on_the_seed_not_on_others(policy: TransformersPolicy) -> None:
    request = ask("hello")
    together = await asyncio.gather(*(policy.for_episode(episode(n))(request) for n in range(6)))
    alone = [await policy.for_episode(episode(n))(request) for n in range(6)]
    ids = [response.completion_token_ids for response in alone]
    assert [response.completion_token_ids for response in together] == ids
    assert len(set(ids)) > 1


async def test_repeated_prompt_gets_another_sample(policy: TransformersPolicy) -> None:
    client = policy.for_episode(episode())
    first, second = await client(ask("hello")), await client(ask("hello"))
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.completion_token_ids != second.completion_token_ids


async def test_temperature_0_takes_the_most_likely_token(policy: TransformersPolicy, model: Any) -> None:
    import torch

    response = await policy.for_episode(episode())(ask("hello", temperature=0.0))
    prompt, ids = list(response.prompt_token_ids or ()), list(response.completion_token_ids or ())
    likeliest = model(torch.tensor([prompt + ids])).logits[0].argmax(-1).tolist()
    assert likeliest[len(prompt) - 1 : -1] == ids
    assert response.logprobs == pytest.approx(recomputed(model, response), abs=1e-4)


async def test_top_k_and_top_p_exclude_tokens(model: Any, tokenizer: Any, policy: TransformersPolicy) -> None:
    greedy = (await policy.for_episode(episode())(ask("hello", temperature=0.0))).completion_token_ids
    for bound in ({"top_k": 1}, {"top_p": 1e-6}):
        bounded = TransformersPolicy.of(model, tokenizer, max_output_tokens=8, **bound)
        responses = [await bounded.for_episode(episode(n))(ask("hello")) for n in range(2)]
        await bounded.close()
        assert [response.completion_token_ids for response in responses] == [greedy, greedy]
        assert responses[0].sampling.items() >= bound.items()


async def test_sampling_defaults_of_a_model_are_ignored(tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    plain = TransformersPolicy.of(model, tokenizer, max_output_tokens=8)
    before = await plain.for_episode(episode())(ask("hello"))
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.suppress_tokens = list(before.completion_token_ids or ())
    after = await plain.for_episode(episode())(ask("hello"))
    await plain.close()
    assert after.completion_token_ids == before.completion_token_ids
    assert model.generation_config.repetition_penalty == 5.0


async def test_stop_strings_end_a_response(policy: TransformersPolicy, tokenizer: Any) -> None:
    client = policy.for_episode(episode())
    whole = await client(ask("hello"))
    stop = tokenizer.decode(list(whole.completion_token_ids or ())[3:5])
    stopped = await policy.for_episode(episode())(ask("hello", stop_sequences=["never said", stop]))
    assert stopped.completion_token_ids == (whole.completion_token_ids or ())[:5]
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (whole.finish_reason, stopped.finish_reason) == ("length", "stop")


async def conversation(client: LLMClient, *said: str, **more: Any) -> list[LLMResponse]:
    texts: list[str] = []
    responses = []
    for text in said:
        texts.append(text)
        responses.append(await client(ask(*texts, **more)))
        texts.append(responses[-1].text)
    return responses


def all_ids(response: LLMResponse) -> tuple[int, ...]:
    return (*(response.prompt_token_ids or ()), *(response.completion_token_ids or ()))


async def test_conversation_extends_one_token_sequence(policy: TransformersPolicy, model: Any, tokenizer: Any) -> None:
    """Invalid bytes come back as text that differs from the sampled tokens."""
    responses = await conversation(policy.for_episode(episode(1)), "hello", "go on", "more", system_prompt="Be short.")
    for earlier, later in itertools.pairwise(responses):
        assert all_ids(later)[: len(all_ids(earlier))] == all_ids(earlier)
        added = tokenizer.decode(list(later.prompt_token_ids or ())[len(all_ids(earlier)) :])
        assert added.removeprefix("<|im_end|>").startswith("\n<|im_start|>user\n")
        assert added.endswith("<|im_end|>\n<|im_start|>assistant\n")
    whole = all_ids(responses[-1])
    place = len(responses[0].prompt_token_ids or ())
    row = LLMResponse((), prompt_token_ids=whole[:place], completion_token_ids=whole[place:])
    assert recomputed(model, row)[: len(responses[0].logprobs or ())] == pytest.approx(responses[0].logprobs, abs=1e-4)
    assert any("�" in response.text for response in responses), "the test says nothing about what is no text"

    rendered = TransformersPolicy.of(model, tokenizer, max_output_tokens=8, continue_tokens=False)
    forked = await conversation(rendered.for_episode(episode(1)), "hello", "go on", system_prompt="Be short.")
    await rendered.close()
    assert all_ids(forked[1])[: len(all_ids(forked[0]))] != all_ids(forked[0])


async def test_rewritten_history_is_rendered_again(policy: TransformersPolicy, tokenizer: Any) -> None:
    client = policy.for_episode(episode())
    await client(ask("hello"))
    response = await client(ask("hello", "I never said that", "go on"))
    assert "I never said that<|im_end|>" in tokenizer.decode(list(response.prompt_token_ids or ()))


async def test_tool_calls_continue_from_their_ids(
    policy: TransformersPolicy, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    said = tokenizer(f"I look.\n{call}<|im_end|>")["input_ids"]
    monkeypatch.setattr("ares_exp.policies.transformers_policy.choose", lambda logits, row: (said[len(row.ids)], -1.0))
    client = policy.for_episode(episode())
    request = LLMRequest([{"role": "user", "content": "?"}], tools=TOOLS, max_output_tokens=999)
    monkeypatch.setitem(policy._sampling, "max_output_tokens", None)
    response = await client(request)
    (text, asked) = response.data
    assert text == TextData("I look.")
    assert isinstance(asked, ToolCallData)
    assert (asked.name, asked.arguments) == ("bash", '{"command": "ls"}')
    assert response.finish_reason == "tool_calls"
    made = {"id": asked.id, "type": "function", "function": {"name": asked.name, "arguments": asked.arguments}}
    later = LLMRequest(
        [
            *request.messages,
            {"role": "assistant", "content": "I look.", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": asked.id, "content": "a b"},
        ],
        tools=TOOLS,
        max_output_tokens=999,
    )
    second = await client(later)
    assert second.prompt_token_ids[: len(all_ids(response))] == all_ids(response)
    assert tokenizer.decode(list(second.prompt_token_ids[len(all_ids(response)) :])) == (
        "\n<|im_start|>user\n<tool_response>\na b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_cancelled_request_ends(policy: TransformersPolicy) -> None:
    long = asyncio.ensure_future(policy.for_episode(episode())(ask("hello", max_output_tokens=8000)))
    policy._sampling["max_output_tokens"] = None
    await policy.preflight()
    long.cancel()
    endless = asyncio.ensure_future(policy.for_episode(episode())(ask("hello", max_output_tokens=8000)))
    await asyncio.sleep(0.1)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    response = await policy.for_episode(episode())(ask("hello", max_output_tokens=2))
    assert response.usage.generated_tokens == 2
    assert long.cancelled() or long.done()


async def test_event_loop_stays_free_during_generation(policy: TransformersPolicy) -> None:
    policy._sampling["max_output_tokens"] = None
    await policy.preflight()
    response = asyncio.ensure_future(policy.for_episode(episode())(ask("x" * 2000, max_output_tokens=60)))
    turns = 0
    while not response.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 10


async def test_weight_updates_change_version_and_samples(tokenizer: Any, tmp_path: Path) -> None:
    model, other = tiny_model(tokenizer), tiny_model(tokenizer, seed=1)
    policy = TransformersPolicy.of(model, tokenizer, max_output_tokens=4, policy_version="0")
    assert isinstance(policy, UpdatablePolicy)
    responses = [await policy.for_episode(episode())(ask("hello"))]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    await policy.update("1", other.state_dict())
    responses.append(await policy.for_episode(episode())(ask("hello")))
    await policy.update("2", lambda: model.load_state_dict(before))
    responses.append(await policy.for_episode(episode())(ask("hello")))
    other.save_pretrained(tmp_path)
    await policy.update("3", tmp_path)
    responses.append(await policy.for_episode(episode())(ask("hello")))
    with pytest.raises(ConfigError, match="'strange'"):
        await policy.update("4", {"strange": before["lm_head.weight"]})
    with pytest.raises(ConfigError, match=r"to have the shape"):
        await policy.update("4", {"lm_head.weight": before["model.norm.weight"]})
    with pytest.raises(ConfigError, match="safetensors"):
        await policy.update("4", tmp_path / "nowhere")
    assert policy.policy_version == "3"
    await policy.close()
    assert [response.policy_version for response in responses] == ["0", "1", "2", "3"]
    first, second, third, fourth = (response.completion_token_ids for response in responses)
    assert first == third != second == fourth
    assert responses[1].logprobs == pytest.approx(recomputed(other, responses[1]), abs=1e-4)


async def test_closed_policy_releases_its_model(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = TransformersPolicy(model=str(tmp_path), device="cpu", max_output_tokens=4)
    await policy.preflight()
    seen = weakref.ref((await policy._model_in_process().loaded()).model)
    said = await policy.for_episode(episode())(ask("hello"))
    assert said.model == str(tmp_path)
    await policy.close()
    gc.collect()
    assert seen() is None
    again = await policy.for_episode(episode())(ask("hello"))
    assert again.completion_token_ids == said.completion_token_ids
    await policy.close()


async def test_invalid_models_are_rejected(model: Any, tmp_path: Path) -> None:
    for given, said in (
        ({"model": None}, "`policy.model` is required"),
        ({"model": str(tmp_path / "nowhere")}, "directory of a saved causal model"),
    ):
        policy = TransformersPolicy(**given)
        with pytest.raises(PreflightError, match=said):
            await policy.preflight()
        await policy.close()
    bare = TransformersPolicy.of(model, tiny_tokenizer(chat_template=""))
    bare_tokenizer = bare._given[1] if bare._given else None
    bare_tokenizer.chat_template = None
    with pytest.raises(PreflightError, match="has no chat template"):
        await bare.preflight()
    named = tmp_path / "template.jinja"
    named.write_text(HERMES)
    fine = TransformersPolicy.of(model, bare_tokenizer, chat_template=named, max_output_tokens=1)
    assert (await fine(ask("hello"))).prompt_token_ids
    await bare.close()
    await fine.close()


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        (ask("x" * 9000), ContextOverflowError, "supports at most 8192"),
        (LLMRequest([{"role": "user", "content": [{"type": "image_url"}]}]), UnsendableRequestError, "image_url"),
        (ask("hello", tools=TOOLS, tool_choice="required"), UnsendableRequestError, "cannot force a tool call"),
    ],
)
async def test_invalid_requests_are_rejected(
    policy: TransformersPolicy, request_: LLMRequest, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        await policy.for_episode(episode())(request_)


async def test_model_with_invalid_logits_is_an_error(tokenizer: Any) -> None:
    import torch

    model = tiny_model(tokenizer)
    policy = TransformersPolicy.of(model, tokenizer, max_output_tokens=4)
    fine = {"model.norm.weight": model.state_dict()["model.norm.weight"].clone()}
    await policy.update("broken", {"model.norm.weight": torch.full((32,), float("nan"))})
    with pytest.raises(PolicyError, match="contain NaN"):
        await policy.for_episode(episode())(ask("hello"))
    await policy.update("mended", fine)
    assert (await policy.for_episode(episode())(ask("hello"))).policy_version == "mended"
    await policy.close()


def watched(model: Any, tokenizer: Any, directory: Path, **more: Any) -> TransformersPolicy:
    return TransformersPolicy.of(model, tokenizer, max_output_tokens=6, output_dir=directory, **more)


def states(model: Any, response: LLMResponse, module: str) -> Any:
    """What a module gives for a response's whole row, by one forward pass."""
    import torch

    seen = []
    handle = model.get_submodule(module).register_forward_hook(
        lambda _, given, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        model(torch.tensor([all_ids(response)]))
    handle.remove()
    return seen[0][0].numpy()


async def test_hidden_states_are_saved_with_the_trajectory(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    import numpy as np

    kept = [
        0,
        {"layer": -1, "positions": "all"},
        {"module": "model.layers.0.mlp", "positions": [0, 2]},
        {"module": "model.embed_tokens", "positions": "prompt"},
    ]
    policy = watched(model, tokenizer, tmp_path, activations=kept)
    requests = [ask("hi"), ask("a longer question"), ask("hello")]
    responses = await asyncio.gather(*(policy.for_episode(episode(n))(one) for n, one in enumerate(requests)))
    await policy.close()
    for response in responses:
        read = read_activations(tmp_path, response)
        prompt, whole = len(response.prompt_token_ids or ()), len(all_ids(response))
        expected = {
            "model.layers.0": slice(prompt - 1, whole - 1),
            "model.layers.1": slice(0, whole - 1),
            "model.layers.0.mlp": [prompt - 1, prompt + 1],
            "model.embed_tokens": slice(0, prompt),
        }
        assert read.keys() == expected.keys()
        for name, positions in expected.items():
            assert isinstance(read[name], np.memmap)
            np.testing.assert_allclose(read[name], states(model, response, name)[positions], atol=1e-5)
            assert response.activations[name]["rows"] == len(read[name])
        assert (response.activations or {})["model.layers.0"]["first_position"] == prompt - 1
    again = watched(model, tokenizer, tmp_path, activations=kept)
    resumed = await again.for_episode(episode(0))(requests[0])
    await again.close()
    assert resumed.activations != responses[0].activations, "what is there is not written over"
    outside = LLMResponse((), activations={"layer": {"file": "../elsewhere.npy"}})
    with pytest.raises(ConfigError, match="to be the path of a file in"):
        read_activations(tmp_path / "activations", outside)


async def test_hidden_states_are_bounded(
    tokenizer: Any, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state has 32 numbers of 4 bytes, and a response 6 states: there is room for two responses."""
    policy = watched(model, tokenizer, tmp_path, activations=[0], activations_max_bytes=2 * 6 * 32 * 4 + 8)
    responses = [await policy.for_episode(episode(n))(ask("hello")) for n in range(4)]
    await policy.close()
    assert [response.usage.generated_tokens for response in responses] == [6] * 4
    assert [response.activations is None for response in responses] == [False, False, True, True]
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 2
    assert ["further responses are not stored" in message for message in caplog.messages] == [True]


async def test_cancelled_response_leaves_no_files(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    began = threading.Event()
    hook = {"layer": 0, "function": lambda *_: began.set()}
    policy = watched(model, tokenizer, tmp_path, activations=[0], hooks=[hook])
    policy._sampling["max_output_tokens"] = None
    await policy.preflight()
    asked = asyncio.ensure_future(policy.for_episode(episode())(ask("hello", max_output_tokens=8000)))
    await asyncio.to_thread(began.wait)
    asked.cancel()
    await policy.close()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


async def test_saved_states_are_copies(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    earlier: list[Any] = []

    def overwrite(states: Any, _: ForwardPass) -> None:
        for one in earlier:
            one.zero_()
        earlier.append(states)

    policy = watched(model, tokenizer, tmp_path, activations=[0], hooks=[{"layer": 0, "function": overwrite}])
    response = await policy.for_episode(episode())(ask("hello"))
    await policy.close()
    assert read_activations(tmp_path, response)["model.layers.0"].any(axis=1).all()


async def test_functions_change_hidden_states(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    import torch

    seen: list[ForwardPass] = []

    def silence(states: Any, forward: ForwardPass) -> Any:
        seen.append(forward)
        return torch.zeros_like(states)

    plain = TransformersPolicy.of(model, tokenizer, max_output_tokens=6)
    before = await plain.for_episode(episode())(ask("hello"))
    await plain.close()
    hooked = watched(model, tokenizer, tmp_path, activations=[1], hooks=[{"layer": -1, "function": silence}])
    after = await hooked.for_episode(episode())(ask("hello"))
    await hooked.close()
    uniform = -torch.log(torch.tensor(float(len(tokenizer)))).item()
    assert after.logprobs == pytest.approx([uniform] * 6, abs=1e-4)
    assert not read_activations(tmp_path, after)["model.layers.1"].any(), "what is kept is what was made of it"
    assert [forward.num_generated for forward in seen] == list(range(6))
    assert seen[0].episode == episode()
    assert seen[0].prompt_length == len(after.prompt_token_ids or ())
    assert before.logprobs != pytest.approx([uniform] * 6, abs=1e-3)

    looking = TransformersPolicy.of(
        model, tokenizer, max_output_tokens=6, hooks=[{"module": "model.norm", "function": lambda states, _: None}]
    )
    assert (await looking.for_episode(episode())(ask("hello"))).completion_token_ids == before.completion_token_ids
    await looking.close()


async def test_missing_modules_and_hooks_are_rejected(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    for given, said in (
        ({"activations": [2]}, "The model has no layer 2, only 2 layers"),
        ({"activations": [{"module": "nowhere"}]}, "'nowhere'"),
        ({"hooks": [{"layer": -3, "function": "math.sqrt"}]}, "no layer -3"),
    ):
        policy = watched(model, tokenizer, tmp_path, **given)
        with pytest.raises(PreflightError, match=said):
            await policy.preflight()
        await policy.close()
    with pytest.raises(ValueError, match="either `layer` or `module`"):
        TransformersPolicy(model="m", activations=[{"positions": "all"}])
    with pytest.raises(ConfigError, match=r"policy\.output_dir"):
        TransformersPolicy(model="m", activations=[0])
    with pytest.raises(ConfigError):
        TransformersPolicy(model="m", hooks=[{"layer": 0, "function": "nowhere.at.all"}])
