"""The types of the bodies and queries of requests to the rollout service, and of its responses.

Also converts finished episodes to the lines of `GET /v1/episodes`.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ares_exp.errors import UntrainableError, may_pass
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.training.sampled_calls import MAX_LOGPROB, SampledCall, calls_of
from ares_exp.training.sampled_calls import Accepted as AcceptedCalls
from ares_exp.training.sequences import TrainingSequence, sequences_of
from ares_exp.trajectories.records import EpisodeTrajectory

if TYPE_CHECKING:
    from ares_exp.training.driver import DrivenEpisode

PROTOCOL = 1
MAX_ROLLOUTS = 65_536

Name = Annotated[str, Field(min_length=1, max_length=512)]
RolloutId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@-]{1,200}$")]
Seconds = Annotated[float, Field(gt=0, le=604_800, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Wait = Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)]
State = Literal["waiting", "running", "finished", "truncated", "failed", "cancelled", "stale"]
Stage = Literal["start", "agent", "policy", "verify", "rows"]
Keep = Literal["nothing", "calls"]


class Body(BaseModel):
    """A JSON object. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskName(Body):
    """The name of a task of the run."""

    name: Name


class PolicyBody(Body):
    """The endpoint that responds to the LLM calls of a rollout.

    Attributes:
        mode: `endpoint` sends calls to `base_url`. `relay` keeps them until the trainer fetches them with
            `GET /v1/requests` and responds with `POST /v1/responses`.
        wire: API of the endpoint. `ids` sends prompts as token ids that start with the ids of earlier calls.
        base_url: URL of the endpoint, including the version. Required if `mode` is `endpoint`.
        model: Name of the model.
        tokenizer: Directory or hub name of the tokenizer, for `ids`, `relay` and `on_abort: continue`. Defaults to
            `model`.
        key: API key: `env:NAME` for an environment variable of the server, or the key itself, which is never stored.
        headers: HTTP headers of each call. `{rollout_id}` is replaced by the id of the rollout.
        sampling: Sampling parameters, which take precedence over the agent's parameters.
        extra_body: Additional fields of each call.
        on_abort: Action if the engine aborts a response. `resample` repeats the call, `continue` continues the response
            from its sampled ids, and `fail` fails the episode. `continue` requires the wire `ids` or `sglang`, and a
            tokenizer. `relay` always continues.
    """

    mode: Literal["endpoint", "relay"] = "endpoint"
    wire: Literal["chat", "responses", "messages", "ids", "sglang"] = "chat"
    base_url: Annotated[str, Field(max_length=2048)] | None = None
    model: Name
    tokenizer: Name | None = None
    key: str | None = Field(default=None, max_length=4096, repr=False)
    headers: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,100}$")], Annotated[str, Field(max_length=4096)]] = {}
    sampling: dict[str, Any] = {}
    extra_body: dict[str, Any] = {}
    on_abort: Literal["resample", "continue", "fail"] = "resample"

    @property
    def needs_tokenizer(self) -> bool:
        """Whether the service converts prompts to token ids, for which it needs the model's tokenizer."""
        return self.mode == "relay" or self.wire == "ids" or self.on_abort == "continue"


class RolloutLimits(Body):
    """The limits of an episode.

    Attributes:
        seconds: Time limit of the agent. `null` uses the limit of the run.
        steps: Maximum number of LLM responses. `null` uses the limit of the run.
        row_tokens: Maximum number of tokens of a row. Longer rows are cut. `null` means no limit.
    """

    seconds: Seconds | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    row_tokens: Annotated[int, Field(ge=1)] | None = None


class SubmissionBody(Body):
    """A submission of rollouts: `n` rollouts of each task.

    Attributes:
        tasks: Tasks, in order.
        n: Number of rollouts per task.
        group_id: Name of the group, which is copied to each episode.
        rollout_ids: Ids of the rollouts, in the order of the tasks. `null` creates ids. If the ids were submitted
            before, the service returns the existing submission.
        policy: Endpoint of all rollouts.
        policies: Fields that replace fields of `policy` for single rollouts, by rollout id.
        want: Content of the episodes, in addition to the reward.
        conversations: Names or patterns of the conversations whose rows or calls the episodes contain.
        realign_tokens: Maximum number of sampled tokens at the end of a row that the next prompt may replace. If more
            tokens differ, the next call starts a new row.
        encoding: Encoding of token lists. `packed` is base64: little-endian int32 ids, uint8 masks, float32 logprobs.
        limits: Limits of each episode.
        max_staleness: Maximum age of the oldest response of an episode, in versions.
        on_stale: Action if a response exceeds `max_staleness`. `replace` runs another attempt, and `report` returns
            the episode with the state `stale`.
        replace_failed: Maximum number of further attempts that replace failed attempts of a rollout.
        seed: Number from which the seeds of the rollouts are derived. `null` uses the seed of the run.
        lease_sec: Number of seconds without a call from the trainer after which the rollouts are cancelled.
        metadata: Any data, which is copied to each episode.
    """

    tasks: Annotated[list[TaskName], Field(min_length=1, max_length=MAX_ROLLOUTS)]
    n: Annotated[int, Field(ge=1, le=MAX_ROLLOUTS)] = 1
    group_id: Name | None = None
    rollout_ids: Annotated[list[RolloutId], Field(max_length=MAX_ROLLOUTS)] | None = None
    policy: PolicyBody
    policies: dict[RolloutId, dict[str, Any]] = {}
    want: Literal["reward", "rows", "calls", "trajectory"] = "rows"
    conversations: Annotated[list[Name], Field(min_length=1, max_length=100)] = ["main"]
    realign_tokens: Count = 0
    encoding: Literal["json", "packed"] = "json"
    limits: RolloutLimits = RolloutLimits()
    max_staleness: Count | None = None
    on_stale: Literal["replace", "report"] = "replace"
    replace_failed: Annotated[int, Field(ge=0, le=16)] = 0
    seed: Count | None = None
    lease_sec: Seconds | None = None
    metadata: dict[str, Any] = {}

    @property
    def needs_tokens(self) -> bool:
        """Whether the responses must contain token ids, because the episodes contain rows or calls."""
        return self.want in ("rows", "calls")


class Submitted(Body):
    """The ids of an accepted submission and of its rollouts."""

    submission_id: str
    rollout_ids: list[str]


class CancelBody(Body):
    """A cancellation. With `keep: calls`, the cancelled episodes contain the LLM calls before the cancellation."""

    keep: Keep = "nothing"


class Cancelled(Body):
    """The state of each rollout after a cancellation, by its id. The containers of the rollouts are released."""

    states: dict[str, State]


class RequestsQuery(Body):
    """A query for LLM requests of one or all submissions. If there are none, the service waits up to `wait` seconds."""

    submission: Name | None = None
    wait: Wait = 0.0
    max: Annotated[int, Field(ge=1, le=4096)] = 64


class TokenRequestFacts(Body):
    """An LLM request of a rollout with the policy mode `relay`, as token ids. The trainer samples the response.

    Attributes:
        request_id: Id of the request.
        rollout_id: Rollout of the request.
        prompt_ids: Token ids of the prompt.
        sampling: Sampling parameters.
        deadline: Time in epoch seconds until which the service waits for the response. After that, the next query
            returns the request again.
    """

    request_id: str
    rollout_id: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    deadline: float


class TokenRequests(Body):
    """LLM requests for which the trainer samples the responses, from the oldest to the newest."""

    requests: list[TokenRequestFacts]


class SampledBody(Body):
    """The trainer's response to an LLM request of a rollout with the policy mode `relay`.

    Attributes:
        request_id: Id of the request.
        ids: Sampled token ids, including the token that ended the response. An empty list with the stop `length` means
            that the prompt is longer than the model's context.
        logprobs: Log-probability of each sampled token.
        version: Version of the weights. `null` means the version that was current when the request was fetched.
        stop: Reason why the response ended. `abort` means that the engine stopped early. The service then requests the
            rest of the response.
    """

    request_id: Annotated[str, Field(max_length=100)]
    ids: list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]]
    logprobs: list[Annotated[float, Field(strict=True, allow_inf_nan=False, le=MAX_LOGPROB)]]
    version: Name | None = None
    stop: Literal["stop", "length", "abort"]

    @model_validator(mode="after")
    def _check_lengths(self) -> SampledBody:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(
                f"expected one log-probability per token id, got {len(self.ids)} ids and {len(self.logprobs)} logprobs"
            )
        if not self.ids and self.stop == "stop":
            raise ValueError("expected sampled ids, got none. Use the stop `length` for a prompt that is too long")
        return self


class Accepted(Body):
    """Whether a response was used. A response is ignored if its request already has one, or is no longer open."""

    accepted: bool


class AckBody(Body):
    """An acknowledgement of all episodes of one or all submissions up to a cursor. The service deletes them."""

    cursor: Count
    submission_id: Name | None = None


class Acked(Body):
    """The number of episodes that this call acknowledged."""

    freed: int


class VersionBody(Body):
    """The version of the weights that generates responses from now on, and its number, from which ages are computed."""

    version: Annotated[str, Field(min_length=1, max_length=200)]
    index: Count | None = None


class PauseBody(Body):
    """A pause of LLM calls, or of the start of episodes.

    Attributes:
        scope: `requests` pauses LLM calls, and `starts` pauses the start of episodes. The time limits of an episode do
            not include pauses.
        drain_sec: Maximum time in seconds to wait until no call is in flight.
        for_sec: Number of seconds after which the service resumes automatically.
    """

    scope: Literal["requests", "starts"] = "requests"
    drain_sec: Wait = 0.0
    for_sec: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 600.0


class ResumeBody(Body):
    """The scope of the pause to end. `null` ends all pauses."""

    scope: Literal["requests", "starts"] | None = None


class ServiceState(Body):
    """The number of calls in flight, the remaining seconds of each pause, and the version of the weights."""

    in_flight: int
    paused: dict[str, float]
    version: str | None


class EpisodesQuery(Body):
    """A query for episodes of one or all submissions after a cursor. Waits up to `wait` seconds for new ones."""

    submission: Name | None = None
    after: Count = 0
    wait: Wait = 0.0


class TasksQuery(Body):
    """A query for a page of tasks: at most `limit` tasks after the task `after`."""

    after: Name | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000


class TaskFacts(Body):
    """A task.

    Attributes:
        name: Name of the task.
        metadata: Known facts about the task: its `digest`, its origin, and the table `metadata` of its `task.toml` if
            the task is in the Harbor format.
    """

    name: str
    metadata: dict[str, Any]


class TaskPage(Body):
    """A page of tasks. `next` is the value of `after` for the next page; `null` on the last page."""

    tasks: list[TaskFacts]
    next: str | None


class Capacity(Body):
    """The numbers of running and waiting rollouts, and the maximum of their sum."""

    running: int
    waiting: int
    limit: int


class Info(Body):
    """Facts about the service: versions, number of tasks, agent, supported policy modes and APIs, and capacity."""

    protocol: int
    ares_exp_version: str
    version: str | None
    tasks: int
    agent: str
    modes: list[str]
    wires: list[str]
    capacity: Capacity
    unacknowledged: int
    run_dir: str


class ErrorFacts(Body):
    """An error of an episode.

    Attributes:
        stage: Stage of the episode that failed.
        type: Class of the error.
        message: Message of the error.
        transient: Whether another attempt may succeed.
    """

    stage: Stage
    type: str
    message: str
    transient: bool


class Loss(Body):
    """An attempt that failed or was stale, and was therefore replaced by another attempt."""

    attempt: int
    state: State
    error: ErrorFacts | None


class OfRollout(Body):
    """The rollout to which a state or an episode belongs, and the state and the error of its attempt."""

    rollout_id: str
    submission_id: str
    group_id: str | None
    task: str
    attempt: int
    state: State
    error: ErrorFacts | None


class RolloutFacts(OfRollout):
    """The state of a rollout, and of its current attempt.

    Attributes:
        attempt: Number of the current attempt at the task.
        stage: What the running episode waits for; `null` if no episode is running.
        seconds: Seconds since the start of the running episode; 0 if no episode is running.
        calls: Number of LLM responses in the current attempt.
        cursor: Position of the rollout's episode in `GET /v1/episodes`; `null` until the episode is available.
    """

    stage: Literal["start", "policy", "environment", "end"] | None
    seconds: float
    calls: int
    cursor: int | None


class EncodedTokens(Body):
    """Tokens of a conversation. With the encoding `packed`, `ids` and `logprobs` are base64 strings."""

    conversation: str
    ids: list[int] | str
    logprobs: list[float] | str
    finish_reason: str | None


class Row(EncodedTokens):
    """A training row. With the encoding `packed`, `ids`, `mask` and `logprobs` are base64 strings.

    Attributes:
        conversation: Name of the conversation.
        made: `clean` if every call continues where the previous call ended. `realigned` if tokens of a prompt replaced
            sampled tokens. `forked` if the row starts with a rewritten history.
        ids: All tokens.
        mask: 1 for each token that is trained on, otherwise 0.
        logprobs: Log-probability of each token; 0.0 where the mask is 0.
        prompt_tokens: Number of tokens before the first sampled token.
        steps: `step_index` of each sampled action.
        starts: Index in `ids` at which the tokens of each step start.
        versions: Versions of the weights that sampled the tokens.
        finish_reason: Reason why the last response ended.
        cut: Number of tokens that were cut off by `limits.row_tokens`.
    """

    made: Literal["clean", "realigned", "forked"]
    mask: list[int] | str
    prompt_tokens: int
    steps: list[int]
    starts: list[int]
    versions: list[str]
    cut: int = 0


class Call(EncodedTokens):
    """One LLM call. With the encoding `packed`, `prompt_ids`, `ids` and `logprobs` are base64 strings."""

    step: int
    prompt_ids: list[int] | str
    version: str | None


class Times(Body):
    """Durations of the phases of an episode in seconds.

    Attributes:
        queue: Time from the submission to the start of the episode.
        start: Start of the container and the agent.
        engine: LLM calls.
        tools: Commands of the agent.
        verify: Verifier and scorers.
    """

    queue: float
    start: float
    engine: float
    tools: float
    verify: float


class Tokens(Body):
    """Numbers of prompt tokens and sampled tokens of all LLM calls of an episode."""

    prompt: int
    sampled: int


class Episode(OfRollout):
    """The result of a rollout: one line of `GET /v1/episodes`.

    Attributes:
        cursor: Position of the line in the order of all lines, starting at 1.
        attempt: Number of the attempt at the task, as in the run directory.
        episode_id: Id of the episode in the run directory; `null` if no episode was started.
        replaces: Number of the attempt that this attempt replaces; `null` if it is the first attempt of the rollout.
        losses: Attempts of the rollout that were replaced.
        state: State of the rollout.
        reward: Reward of the episode; `null` without a reward.
        rewards: Rewards of the verifier and the scorers, by name.
        trainable: Whether the episode finished or was truncated, has a reward, and has the requested content.
        error: Error of the episode; `null` without an error.
        versions: Versions of the weights that generated its responses, in order of first use.
        version_min: Smallest number (`index`) of these versions; `null` if unknown. `version_max` is the largest.
        staleness: Number of versions between the oldest of these versions and the current version.
        finish: `submitted`, or the limit that truncated the episode.
        encoding: Encoding of rows and calls.
        rows: Rows, if requested.
        calls: Calls, if requested.
        trajectory: Trajectory, if requested.
    """

    cursor: int
    episode_id: str | None
    replaces: int | None
    losses: list[Loss]
    reward: float | None
    rewards: dict[str, float]
    trainable: bool
    versions: list[str]
    version_min: int | None
    version_max: int | None
    staleness: int | None
    finish: str | None
    encoding: Literal["json", "packed"]
    rows: list[Row] | None
    calls: list[Call] | None
    trajectory: dict[str, Any] | None
    times: Times
    tokens: Tokens
    metadata: dict[str, Any]


class ErrorText(Body):
    """The class and the message of an error."""

    type: str
    message: str


class ErrorBody(Body):
    """The body of a response with an error status."""

    error: ErrorText


STATES: Mapping[Outcome, State] = {
    Outcome.COMPLETED: "finished",
    Outcome.TRUNCATED: "truncated",
    Outcome.CANCELLED: "cancelled",
    Outcome.CLOSED: "cancelled",
}
"""The state of a rollout for each outcome of its episode. All other outcomes result in the state `failed`."""
STAGES: Mapping[Outcome, Stage] = {
    Outcome.POLICY_ERROR: "policy",
    Outcome.VERIFIER_ERROR: "verify",
}


def state_of(result: EpisodeResult) -> State:
    """Returns the state of a rollout whose episode has this result."""
    return STATES.get(result.outcome, "failed")


def error_of(result: EpisodeResult) -> ErrorFacts | None:
    """Returns the error of a failed or cancelled episode; `None` for other episodes."""
    if result.error is None or state_of(result) in ("finished", "truncated"):
        return None
    stage: Stage = STAGES.get(result.outcome, "agent" if result.num_steps else "start")
    kind = result.error.type
    is_transient = may_pass(kind) or result.outcome is Outcome.LOST
    return ErrorFacts(stage=stage, type=kind, message=result.error.message, transient=is_transient)


def episode_fields(
    episode: DrivenEpisode, body: SubmissionBody, *, temperature: float | None, submitted_at: float
) -> dict[str, Any]:
    """Returns the fields of a line that describe its episode. This takes much CPU time for long episodes.

    Args:
        episode: Finished episode.
        body: Submission of the rollout, which selects the content.
        temperature: Temperature at which the tokens were sampled; `None` if it is unknown.
        submitted_at: Time of the submission, in epoch seconds.
    """
    result, error = episode.result, error_of(episode.result)
    content: dict[str, Any] = {}
    if body.want != "reward":
        try:
            content = _content(episode.trajectory, body, temperature)
        except UntrainableError as untrainable:
            error = error or ErrorFacts(
                stage="rows", type=type(untrainable).__name__, message=str(untrainable), transient=False
            )
    spent = result.phase_sec
    return {
        "attempt": result.attempt,
        "episode_id": result.episode_id,
        "reward": result.reward,
        "rewards": dict(result.rewards),
        "trainable": result.reward is not None and (body.want == "reward" or any(content.values())),
        "error": error.model_dump() if error is not None else None,
        "versions": list(episode.versions),
        "finish": "submitted" if result.outcome is Outcome.COMPLETED else result.limit,
        **content,
        "times": {
            "queue": round(max(0.0, result.started_at - submitted_at), 3),
            "start": round(spent.get("start", 0.0), 3),
            "engine": round(spent.get("policy", 0.0), 3),
            "tools": round(spent.get("agent", 0.0), 3),
            "verify": round(spent.get("verify", 0.0) + spent.get("score", 0.0), 3),
        },
        "tokens": {"prompt": result.prompt_tokens, "sampled": result.generated_tokens},
    }


def _content(trajectory: EpisodeTrajectory | None, body: SubmissionBody, temperature: float | None) -> dict[str, Any]:
    """Returns the content that `body.want` requests. Raises `UntrainableError` for missing or untrainable calls."""
    if trajectory is None:
        raise UntrainableError("The episode has no trajectory.")
    if body.want == "trajectory":
        return {"trajectory": trajectory.to_dict()}
    if body.want == "calls":
        accepted = AcceptedCalls(body.conversations, temperature)
        return {"calls": [_call_of(call, body.encoding) for call in calls_of(trajectory, accepted)]}
    report = sequences_of(
        trajectory, conversations=body.conversations, realign_tokens=body.realign_tokens, temperature=temperature
    )
    rows = [row_of(row, body.encoding, body.limits.row_tokens) for row in report.rows]
    return {"rows": [row for row in rows if row is not None]}


def row_of(row: TrainingSequence, encoding: str, limit: int | None = None) -> dict[str, Any] | None:
    """Returns a row as JSON-ready data, cut to `limit` tokens; `None` if the cut row has no sampled token."""
    length = len(row.ids) if limit is None else min(limit, len(row.ids))
    starts = [start for start in row.starts if start < length]
    if not starts:
        return None
    return {
        "conversation": row.conversation,
        "made": row.made,
        "ids": _encoded(encoding, "i", row.ids[:length]),
        "mask": _encoded(encoding, "B", row.mask[:length]),
        "logprobs": _encoded(encoding, "f", row.logprobs[:length]),
        "prompt_tokens": row.starts[0],
        "steps": list(row.steps[: len(starts)]),
        "starts": starts,
        "versions": list(row.policy_versions),
        "finish_reason": row.finish_reason if length == len(row.ids) else "length",
        "cut": len(row.ids) - length,
    }


def _call_of(call: SampledCall, encoding: str) -> dict[str, Any]:
    return {
        "step": call.step,
        "conversation": call.conversation,
        "prompt_ids": _encoded(encoding, "i", call.prompt),
        "ids": _encoded(encoding, "i", call.completion),
        "logprobs": _encoded(encoding, "f", call.logprobs),
        "version": call.policy_version,
        "finish_reason": call.finish_reason,
    }


def _encoded(encoding: str, kind: str, values: Sequence[Any]) -> list[Any] | str:
    """Encodes values as base64, little-endian, if the encoding is `packed`, otherwise as a list.

    `kind` is an array type (`i`: int32, `B`: uint8, `f`: float32).
    """
    if encoding != "packed":
        return list(values)
    made = array(kind, values)
    if sys.byteorder == "big":
        made.byteswap()
    return base64.b64encode(made.tobytes()).decode()


def decoded(values: Sequence[Any] | str, kind: str) -> Sequence[Any]:
    """Decodes numbers of the array type `kind` from base64. Values that are not base64 are returned unchanged."""
    if not isinstance(values, str):
        return values
    unpacked: array[Any] = array(kind, base64.b64decode(values))
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked
