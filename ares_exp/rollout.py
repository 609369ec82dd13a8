"""The rollout loop, which runs one episode from reset to LAST. If you are new to the code, read this file first."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ares_exp.config.parts import has_members
from ares_exp.environment import EnvironmentBase, MinimalEnvironment, PendingRequest, TimeStep, complete
from ares_exp.errors import ContextOverflowError, PolicyError, PolicyTimeoutError, RefusalError, UnansweredError
from ares_exp.llms.request import LLMClient
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.asked_ahead import AskedAhead, ForesightedClient, concurrency_of
from ares_exp.policies.episode_events import EpisodeEvents, ResponseDeadline
from ares_exp.policies.policy import checked_response


async def run_episode(
    environment: MinimalEnvironment,
    policy: LLMClient,
    events: EpisodeEvents | None = None,
    *,
    policy_timeout_sec: float | None = None,
) -> TimeStep[Any]:
    """Runs one episode and returns its LAST time step. Always closes the environment, also after an error.

    If the environment has a time limit, and the policy does not respond in time, the environment receives `None`. It
    then ends the episode, or the current stage of the task.

    If a request is longer than the model's context, the episode is truncated or, if the environment does not support
    this, fails.

    If the agent waits for several responses, and the policy accepts concurrent requests (`ConcurrentClient`), the
    policy receives all pending requests at once. The environment receives one response at a time, in the order of its
    requests.

    Args:
        environment: Environment that the loop enters, resets, steps and closes.
        policy: Client that responds to the observations.
        events: Object that records times, tokens and cost of the episode, also if an exception ends the episode.
        policy_timeout_sec: Time limit of one response in seconds. It starts when the loop waits for this response.

    Raises:
        PolicyError: The policy failed, or returned no response within `policy_timeout_sec`.
        AgentError: The agent failed in the environment.
        ContainerError: A container of the environment failed.
        VerifierError: The verifier of the environment failed.
    """
    events = events or EpisodeEvents()
    client = policy if has_members(policy, ForesightedClient) else _foresighted(policy, events)
    env = complete(environment)
    async with env:
        time_step = await env.reset()
        watching = _watching(env, client, time_step)
        try:
            while time_step.step_type != "LAST":
                events.wait_for("policy")
                if client.looks_ahead:
                    client.expect(_pending(env, time_step))
                try:
                    response = await _ask(client, time_step.observation, events, policy_timeout_sec, env.time_left_sec)
                except ContextOverflowError:
                    if (cut := await env.truncate("context")) is None:
                        raise
                    time_step = cut
                    continue
                events.wait_for("environment")
                time_step = await env.step(response)
        finally:
            if watching is not None:
                watching.cancel()
            await client.close()
        events.last = time_step
        events.wait_for("end")
        await events.ended()
    return time_step


def _foresighted(policy: LLMClient, events: EpisodeEvents) -> ForesightedClient:
    """Wraps the policy in a client that may send requests concurrently, and that reports their costs to `events`."""

    async def ask(call: PendingRequest, is_ahead: bool) -> LLMResponse:
        try:
            response = await checked_response(policy, call.request)
        except RefusalError as refusal:
            if refusal.response is not None:
                events.pay(refusal.response)
            raise
        events.pay(response)
        return response

    return AskedAhead(ask, concurrency=concurrency_of(policy), has_room=events.has_room, on_wait=events.waited)


def _pending(env: EnvironmentBase, time_step: TimeStep[Any]) -> tuple[PendingRequest, ...]:
    """Returns the pending requests.

    Empty if a wrapper has changed the observation. The wrapper may also change the other requests, so they cannot be
    sent yet.
    """
    pending = env.pending_requests()
    return pending if pending and pending[0].request == time_step.observation else ()


def _watching(env: EnvironmentBase, client: ForesightedClient, first: TimeStep[Any]) -> asyncio.Task[None] | None:
    """Starts a task that runs `_watch`; `None` if no request is pending, or the client accepts only one at a time."""
    pending = _pending(env, first) if client.looks_ahead else ()
    return asyncio.create_task(_watch(env, client, pending)) if pending else None


async def _watch(env: EnvironmentBase, client: ForesightedClient, known: tuple[PendingRequest, ...]) -> None:
    """Passes all pending requests to the client whenever the agent sends a new one during a step."""
    while True:
        known = await env.changed_requests(known)
        client.expect(known)


async def _ask(
    policy: LLMClient, request: Any, events: EpisodeEvents, limit_sec: float | None, left_sec: float | None
) -> LLMResponse | None:
    """Requests a response from the policy. Returns `None` if the environment's time limit `left_sec` passes first."""
    events.deadline = deadline = ResponseDeadline(limit_sec, left_sec)
    started = time.perf_counter()
    try:
        async with deadline.timer:
            response = await policy(request)
    except UnansweredError:
        events.usage.add(None)
        return None
    except PolicyError:
        raise
    except (Exception, SystemExit) as error:
        if deadline.is_time_up:
            events.usage.add(None)
            return None
        if deadline.timer.expired() and events.unreachable is not None:
            raise type(events.unreachable)(
                f"{events.unreachable} It did not respond within timeouts.policy={limit_sec:g} seconds."
            ) from error
        if deadline.timer.expired():
            raise PolicyTimeoutError(f"The policy did not respond within its time limit of {limit_sec:g} s.") from error
        raise PolicyError(f"The policy raised {type(error).__name__}: {error}") from error
    finally:
        events.deadline = None
        events.policy_sec += time.perf_counter() - started
    events.usage.num_steps += 1
    return response
