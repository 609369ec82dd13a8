"""All errors that ares_exp raises on purpose. The class of an error identifies its cause.

```
AresExpError
├── UserError                     the command line, the config or the preflight is at fault (exit code 2)
│   ├── ConfigError                 PresetError (ValueError), PresetLookupError (LookupError)
│   ├── TaskError (ValueError)      UnsupportedTaskError
│   └── PreflightError              GitError, ToolboxError
├── EpisodeError                  one episode has no reward; the others continue
│   ├── AgentError                  NoRequestError, AgentSetupTimeoutError, AgentInstallError, AgentExitError,
│   │                               RepeatedFormatError
│   ├── PolicyError                 PolicyTimeoutError (TimeoutError), ReplayDivergenceError, UnansweredError
│   │   ├── EndpointError             RateLimitError, QuotaError, AuthenticationError, ContextOverflowError,
│   │   │                             RefusalError, ServerError, EndpointTimeoutError (TimeoutError),
│   │   │                             EndpointUnreachableError
│   │   └── WireFormatError (ValueError)  UnsendableRequestError, MalformedResponseError
│   ├── ContainerError              EnvironmentStartTimeoutError (TimeoutError), ContainerStartError, TransferError,
│   │   │                           PortForwardingError, EndpointLostError, HealthcheckError, StepSetupError
│   │   ├── ContainerDiedError        ContainerLostError, HostsLostError
│   │   └── ContainerServiceError     ContainerQuotaError, ContainerRateLimitError, ContainerAuthorizationError,
│   │                                 ContainerNotFoundError, ContainerServiceUnavailableError
│   ├── HostLostError
│   └── VerifierError               AddTestsDirError, DownloadVerifierDirError, RewardFileNotFoundError,
│       │                           RewardFileEmptyError, VerifierOutputParseError, OracleResponseError,
│       │                           VerifierTimeoutError (TimeoutError)
│       └── ScorerError               ScorerTimeoutError (TimeoutError), JudgeResponseError
├── SnapshotError                 SnapshotUnsupportedError, CaptureError, SnapshotMismatchError, RestoreError
│   ├── SnapshotTimingError (RuntimeError)  SnapshotBusyError
│   ├── SnapshotMetadataError (ValueError)  SnapshotNotFoundError (LookupError), SnapshotVersionError,
│   │                                       SnapshotCorruptError, UnsafeSnapshotError
│   └── JournalError                NondeterministicCallError, DivergenceError
├── BudgetExhaustedError
├── StorageError
├── UnreachableError
├── EpisodeStateError (RuntimeError)
├── TrajectoryFormatError (ValueError)  TrajectoryVersionError
├── ServiceError
└── UntrainableError (ValueError)
```

Classes on the right of a class are its subclasses. Other base classes are in parentheses. Names that Harbor also has
(`RewardFileNotFoundError`, …) are spelled as in Harbor, so that reports stay portable. Messages state the expected
value, the actual value and a fix. All classes are in one module, because `retry` and the statistics refer to them by
name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ares_exp.llms.response import LLMResponse


class AresExpError(Exception):
    """Base class of all errors that ares_exp raises on purpose."""


class UserError(AresExpError):
    """The command line or the config is wrong, or a preflight check failed. No episode was started."""


class ConfigError(UserError):
    """A key, a value or a combination of values in the config is wrong."""


class PresetError(ConfigError, ValueError):
    """The name or the selector of a preset is malformed, the name is already in use, or a required value is missing."""


class PresetLookupError(ConfigError, LookupError):
    """The preset does not exist, or does not contain the selected task."""


class TaskError(UserError, ValueError):
    """A task directory is malformed."""


class UnsupportedTaskError(TaskError):
    """A task is well-formed, but uses a feature that is not implemented or not available in this container backend."""


class PreflightError(UserError):
    """A daemon, an API key, an endpoint or a path that the run needs is missing."""


class GitError(PreflightError):
    """Git failed. For example, a repository cannot be reached, or a commit does not exist.

    Attributes:
        said: Output of git, without the fix that the message of the error may suggest.
    """

    def __init__(self, message: str, *, said: str | None = None) -> None:
        super().__init__(message)
        self.said = said or message


class ToolboxError(PreflightError):
    """The package of an agent cannot be fetched, does not match its digest, or does not run on this machine."""


class EpisodeError(AresExpError):
    """One episode ended without a reward. The other episodes continue."""


class AgentError(EpisodeError):
    """The code agent raised an exception."""


class NoRequestError(AgentError):
    """The code agent ended without a single LLM request, or all of its requests were rejected."""


class AgentSetupTimeoutError(AgentError, TimeoutError):
    """The code agent did not send its first request within the time limit."""


class AgentInstallError(AgentError):
    """An installed agent cannot run, because the container's C library is too old or an interpreter is missing."""


class AgentExitError(AgentError):
    """An installed agent ended with an exit code that means failure. The message contains the end of its output."""


class RepeatedFormatError(AgentError):
    """Several replies in a row had a format that the code agent cannot use.

    An agent raises this error to end its episode, which is then truncated (limit `format_errors`) and scored.
    """


class PolicyError(EpisodeError):
    """The policy could not respond to a request."""


class PolicyTimeoutError(PolicyError, TimeoutError):
    """The policy returned no response within the time limit."""


class _Divergence(Exception):
    """An episode that is replayed or restored differs from its record.

    Attributes:
        step: Number of the first request that differs, from 0 in each stage of the task; `None` if unknown.
        entry: Number of the first entry in the agent's journal that differs, from 0; `None` if requests are compared.
        why: Description of the recorded and the current value, which the message also contains.
    """

    def __init__(self, message: str, *, step: int | None = None, entry: int | None = None, why: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.entry = entry
        self.why = why or message


class ReplayDivergenceError(_Divergence, PolicyError):
    """A request in a replayed episode differs from the recorded one. Has the attributes `step`, `entry` and `why`."""


class UnansweredError(PolicyError):
    """A replayed request has no recorded response, because the recorded run reached the environment's time limit.

    The error does not end the episode: the environment receives `None` as the action, as in the recorded run.
    """


class EndpointError(PolicyError):
    """An endpoint returned no usable response.

    Attributes:
        status: HTTP status; `None` if there was no connection, or no response in time.
        code: Code that the server sent for the error, such as `"context_length_exceeded"`, if any.
        retryable: Whether the same request may succeed later.
        retry_after_sec: Seconds that the client should wait, if the server requested a wait.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        retryable: bool = False,
        retry_after_sec: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retryable = retryable
        self.retry_after_sec = retry_after_sec


class RateLimitError(EndpointError):
    """The endpoint rejected a request because there were too many requests (HTTP status 429)."""


class QuotaError(EndpointError):
    """The account has no credit left, or has reached a spending limit. Waiting does not help."""


class AuthenticationError(EndpointError):
    """The API key is invalid, or has no permission for the request (HTTP status 401 or 403)."""


class ContextOverflowError(EndpointError):
    """The request is longer than the model's context."""


class RefusalError(EndpointError):
    """The model, or a filter on its input or output, refused the request.

    Attributes:
        response: Response with the refusal, which is billed; `None` if the endpoint rejected the request.
    """

    response: LLMResponse | None = None


class ServerError(EndpointError):
    """The endpoint failed (HTTP status 5xx)."""


class EndpointTimeoutError(EndpointError, TimeoutError):
    """The endpoint did not send a complete response in time."""


class EndpointUnreachableError(EndpointError):
    """The connection to the endpoint failed or broke.

    Attributes:
        never_connected: Whether no connection was established, so that the endpoint cannot have received the request.
    """

    never_connected = False


class WireFormatError(PolicyError, ValueError):
    """A request or response does not fit the wire format, which is the JSON format of an LLM API."""


class UnsendableRequestError(WireFormatError):
    """A request from the agent contains something that the endpoint's wire format cannot express."""


class MalformedResponseError(WireFormatError):
    """An endpoint's response does not match the wire format, or contains an invalid token usage or cost."""


class ContainerError(EpisodeError):
    """The container failed. This does not include commands in the container that exit with an error."""


class ContainerStartError(ContainerError):
    """The container could not be built, created or started."""


class EnvironmentStartTimeoutError(ContainerError, TimeoutError):
    """The container did not start within its time limit."""


class ContainerDiedError(ContainerError):
    """The container exited or stopped responding while it was needed."""


class PortForwardingError(ContainerError):
    """A forwarded port cannot be opened, because the container lacks something that it needs."""


class EndpointLostError(ContainerError):
    """The connection from an agent in its container to the LLM broke, and could not be restored."""


class ContainerLostError(ContainerDiedError):
    """The container was killed from outside, or its engine is gone. Its own processes did not cause this."""


class HostsLostError(ContainerDiedError):
    """Several hosts of a cluster failed while they ran this attempt, so the attempt may be the cause."""


class HealthcheckError(ContainerError):
    """A health check, which a task defines for its container or for one of its steps, did not succeed."""


class StepSetupError(ContainerError):
    """The set-up script of a task's step failed, or took too long."""


class ContainerServiceError(ContainerError):
    """A container service rejected a request, or did not respond.

    Attributes:
        status: HTTP status; `None` if there is no response.
        retryable: Whether the same request may succeed later.
        retry_after_sec: Seconds that the client should wait, if the service requested a wait.
    """

    retryable = False

    def __init__(self, message: str, *, status: int | None = None, retry_after_sec: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_sec = retry_after_sec


class ContainerQuotaError(ContainerServiceError):
    """A quota of the service does not allow more containers, or larger containers. Waiting does not help."""


class ContainerRateLimitError(ContainerServiceError):
    """The service rejected requests because they were too frequent, even after the maximum wait."""

    retryable = True


class ContainerAuthorizationError(ContainerServiceError):
    """The key of the container service is invalid or expired, or has no permission for the request."""


class ContainerNotFoundError(ContainerServiceError):
    """The requested object, such as an image, a snapshot or a container, does not exist."""


class ContainerServiceUnavailableError(ContainerServiceError):
    """The service failed (HTTP status 5xx), did not respond in time, or could not be reached."""

    retryable = True


class TransferError(ContainerError):
    """Files could not be copied into or out of the container."""


class HostLostError(EpisodeError):
    """The cluster process that hosts the environment ended or does not respond. Another host continues the attempt."""


class VerifierError(EpisodeError):
    """The verifier returned no usable reward."""


class AddTestsDirError(VerifierError):
    """The task's tests could not be copied into the container for the verifier."""


class DownloadVerifierDirError(VerifierError):
    """The verifier's output could not be copied out of the container."""


class RewardFileNotFoundError(VerifierError):
    """The verifier wrote neither reward.json nor reward.txt."""


class RewardFileEmptyError(VerifierError):
    """The reward file is empty."""


class VerifierOutputParseError(VerifierError):
    """The content of the reward file cannot be parsed as a reward."""


class OracleResponseError(VerifierError):
    """The LLM that answers questions in a game (the oracle) failed, or its response cannot be parsed.

    The error is a `VerifierError`, because the oracle judges the replies of the policy, like a verifier. The policy and
    its endpoint are not the cause.
    """


class ScorerError(VerifierError):
    """A scorer raised an error, or returned an invalid reward. The message contains the scorer's name.

    Attributes:
        scorer: Name of the scorer; empty until it is known.
    """

    def __init__(self, message: str, *, scorer: str = "") -> None:
        super().__init__(message)
        self.scorer = scorer


class ScorerTimeoutError(ScorerError, TimeoutError):
    """A scorer did not return within its time limit."""


class JudgeResponseError(ScorerError):
    """The LLM that grades an episode (`scorer=judge`) failed, or its response cannot be parsed."""


class VerifierTimeoutError(VerifierError, TimeoutError):
    """The verifier did not finish within its time limit."""


class BudgetExhaustedError(AresExpError):
    """The budget of the run or its sweep is used up. Running episodes are cancelled, and can be resumed later."""


class StorageError(AresExpError):
    """A response, a row or a trajectory could not be written. Running episodes are cancelled, and can be resumed."""


class UnreachableError(AresExpError):
    """A container engine, a container service or an LLM endpoint cannot be reached.

    No episode starts during the outage. If the outage lasts too long, running episodes are cancelled, and can be
    resumed.
    """


class EpisodeStateError(AresExpError, RuntimeError):
    """A method was called at the wrong time, such as `step()` before `reset()`."""


class SnapshotError(AresExpError):
    """An episode could not be exported, restored, forked or replayed."""


class SnapshotTimingError(SnapshotError, RuntimeError):
    """A snapshot is not possible now, because the environment is not waiting for an action."""


class SnapshotBusyError(SnapshotTimingError):
    """No snapshot could be taken, because commands of the agent did not end within the time limit."""


class SnapshotUnsupportedError(SnapshotError):
    """A snapshot is not possible, because the agent, the container or a value in the agent does not support it."""


class CaptureError(SnapshotError):
    """The container's files could not be read for a snapshot."""


class SnapshotMetadataError(SnapshotError, ValueError):
    """A snapshot cannot be read. The message contains the path and the problem."""


class SnapshotNotFoundError(SnapshotMetadataError, LookupError):
    """The snapshot does not exist."""


class SnapshotVersionError(SnapshotMetadataError):
    """A snapshot does not have the current schema version."""


class SnapshotCorruptError(SnapshotMetadataError):
    """A file of a snapshot is missing, or its content does not match its checksum."""


class UnsafeSnapshotError(SnapshotMetadataError):
    """A snapshot is rejected, because it contains a path outside of its root, a device, or an invalid size."""


class SnapshotMismatchError(SnapshotError):
    """A snapshot cannot be restored with a different task, agent or base image."""


class JournalError(SnapshotError):
    """The state of an agent cannot be restored from its journal, which records the results of its calls."""


class NondeterministicCallError(JournalError):
    """The agent requested input that its journal cannot record: neither its container nor the LLM provides it."""


class DivergenceError(_Divergence, JournalError):
    """A restored agent acted differently than its journal records. Has the attributes `step`, `entry` and `why`."""


class RestoreError(SnapshotError):
    """The container's files could not be restored from a snapshot."""


class TrajectoryFormatError(AresExpError, ValueError):
    """A trajectory file cannot be read. The message contains the path and the position."""


class TrajectoryVersionError(TrajectoryFormatError):
    """A trajectory file does not have the current schema version."""


class ServiceError(AresExpError):
    """The rollout service rejected a call, or cannot be reached.

    Attributes:
        status: HTTP status; `None` if there is no response.
        code: Code that the service sent for the error, if any.
    """

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class UntrainableError(AresExpError, ValueError):
    """LLM calls of an episode cannot be used for training. The message contains the episode, the step and a fix."""


INFRASTRUCTURE: Mapping[str, int] = {
    "ContainerStartError": 2,
    "EnvironmentStartTimeoutError": 2,
    "ContainerLostError": 2,
    "ContainerServiceError": 2,
    "ContainerAuthorizationError": 0,
    "ContainerNotFoundError": 0,
    "OracleResponseError": 1,
    "RateLimitError": 2,
    "ServerError": 2,
    "EndpointUnreachableError": 2,
}
"""Default number of retries for errors that neither the agent, the model nor the tests can cause, by name of the
error class. The number is 0 for classes whose errors are permanent."""


def may_pass(name: str) -> bool:
    """Returns whether errors of the class `name` are temporary, so that a retry is useful."""
    kind: object = globals().get(name)
    bases = [base.__name__ for base in kind.__mro__] if isinstance(kind, type) else []
    return next((INFRASTRUCTURE[base] for base in bases if base in INFRASTRUCTURE), 0) > 0


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Returns the known name that is most similar to `word`, if any, and a second one if it is nearly as similar."""
    names = [name for name in known if "_target_" not in name]
    matches = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    likeness = [difflib.SequenceMatcher(None, match, word).ratio() for match in matches]
    return [match for match, like in zip(matches, likeness, strict=True) if like > likeness[0] - 0.1]


def close_matches(word: str, known: Iterable[str]) -> str:
    """Returns a suggestion for a misspelt word, such as ` Did you mean `x`?`; an empty string if no name is similar."""
    matches = closest(word, known)
    return f" Did you mean {' or '.join(f'`{match}`' for match in matches)}?" if matches else ""


class SweepInterrupted(Exception):
    """The sweep was interrupted, so this job was ended early or not started.

    It is an `Exception`, because a `BaseException` would break the worker process of a Hydra launcher.
    """
