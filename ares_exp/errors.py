"""Every error that ares_exp raises on purpose. The class says whose fault it was.

```
AresExpError
├── UserError                     the command line, the config or the preflight is at fault (exit code 2)
│   ├── ConfigError                 a key, a value or a combination of values is wrong
│   ├── TaskError (ValueError)      a task directory is malformed
│   │   └── UnsupportedTaskError      well-formed, but uses a feature that is not built or not possible here
│   └── PreflightError              something the run needs is not there: a daemon, a key, an endpoint
├── EpisodeError                  one episode has no reward; siblings go on
│   ├── AgentError                  the code agent raised
│   │   ├── NoRequestError            it ended without one LLM request
│   │   └── AgentSetupTimeoutError
│   ├── PolicyError                 the policy could not answer a request
│   │   ├── ReplayDivergenceError     the request differs from the recorded one
│   │   ├── EndpointError               the endpoint refused or failed (ares_exp.policies.retry)
│   │   └── WireFormatError             its answer, or our request, has no place in the wire format (ares_exp.llms.wire)
│   ├── ContainerError              the box, not the command in it, failed
│   │   ├── EnvironmentStartTimeoutError (TimeoutError)
│   │   ├── ContainerStartError
│   │   ├── ContainerDiedError
│   │   └── TransferError
│   └── VerifierError               the verifier gave no usable reward
│       ├── AddTestsDirError
│       ├── DownloadVerifierDirError
│       ├── RewardFileNotFoundError
│       ├── RewardFileEmptyError
│       ├── VerifierOutputParseError
│       └── VerifierTimeoutError (TimeoutError)
├── SnapshotError                 an episode could not be exported, restored, forked or replayed
│   ├── SnapshotTimingError (RuntimeError)  the environment does not wait for an action
│   │   └── SnapshotBusyError                 commands of the agent did not end in time
│   ├── SnapshotUnsupportedError  this agent, container or value cannot be captured
│   ├── CaptureError              the container's files could not be read
│   ├── SnapshotMetadataError (ValueError)  a snapshot cannot be read
│   │   ├── SnapshotNotFoundError (LookupError)
│   │   ├── SnapshotVersionError
│   │   ├── SnapshotCorruptError     an object is missing, or is not what its name says
│   │   └── UnsafeSnapshotError      well-formed, and refused: traversal, devices, sizes out of bounds
│   ├── SnapshotMismatchError     restored with another task, agent or base image than it was made with
│   ├── JournalError
│   │   ├── NondeterministicCallError  the agent reached for the world past its container and its LLM
│   │   └── DivergenceError            the agent, run again, did something else than recorded
│   └── RestoreError              the container could not be given its files back
├── EpisodeStateError (RuntimeError)  step() before reset(), after LAST, or while another call is under way
└── TrajectoryFormatError (ValueError) a trajectory file cannot be read
```

Names that Harbor has too (`RewardFileNotFoundError`, …) are spelt as there, so that reports stay portable.
Messages say what was expected, what was found and what to do about it.
"""

from __future__ import annotations


class AresExpError(Exception):
    """Root of every error raised on purpose."""


class UserError(AresExpError):
    """The command line, the config or the preflight is at fault; nothing has been started."""


class ConfigError(UserError):
    """A key, a value or a combination of values in the config is wrong."""


class TaskError(UserError, ValueError):
    """A task directory is malformed."""


class UnsupportedTaskError(TaskError):
    """A task is well-formed but uses a feature that is not built yet or not possible on this backend."""


class PreflightError(UserError):
    """Something that the run needs is not there: a daemon, a key, an endpoint, a path."""


class EpisodeError(AresExpError):
    """One episode ended without a reward; the others go on."""


class AgentError(EpisodeError):
    """The code agent raised."""


class NoRequestError(AgentError):
    """The code agent ended without a single LLM request."""


class AgentSetupTimeoutError(AgentError, TimeoutError):
    """The code agent sent no first request within its time limit."""


class PolicyError(EpisodeError):
    """The policy could not answer a request."""


class ReplayDivergenceError(PolicyError):
    """A replayed episode received a request that differs from the recorded one."""


class ContainerError(EpisodeError):
    """The container, not the command in it, failed."""


class ContainerStartError(ContainerError):
    """The container could not be built, created or started."""


class EnvironmentStartTimeoutError(ContainerError, TimeoutError):
    """The container did not start within its time limit."""


class ContainerDiedError(ContainerError):
    """The container ended, or no longer answers, while it was needed."""


class TransferError(ContainerError):
    """Files could not be copied into or out of the container."""


class VerifierError(EpisodeError):
    """The verifier gave no usable reward."""


class AddTestsDirError(VerifierError):
    """The task's tests could not be copied into the container."""


class DownloadVerifierDirError(VerifierError):
    """The verifier's output could not be copied out of the container."""


class RewardFileNotFoundError(VerifierError):
    """The verifier wrote neither reward.json nor reward.txt."""


class RewardFileEmptyError(VerifierError):
    """The reward file has no bytes."""


class VerifierOutputParseError(VerifierError):
    """The reward file holds something that is no reward."""


class VerifierTimeoutError(VerifierError, TimeoutError):
    """The verifier did not finish within its time limit."""


class EpisodeStateError(AresExpError, RuntimeError):
    """A method was called at a point of the episode where it makes no sense."""


class SnapshotError(AresExpError):
    """An episode could not be exported, restored, forked or replayed."""


class SnapshotTimingError(SnapshotError, RuntimeError):
    """The environment does not wait for an action: before `reset()`, during a step, or after LAST."""


class SnapshotBusyError(SnapshotTimingError):
    """Commands of the agent were still running when the time for them to end was over."""


class SnapshotUnsupportedError(SnapshotError):
    """This agent, container or value cannot be captured."""


class CaptureError(SnapshotError):
    """The container's files could not be read."""


class SnapshotMetadataError(SnapshotError, ValueError):
    """A snapshot cannot be read; the message names the path and what is wrong."""


class SnapshotNotFoundError(SnapshotMetadataError, LookupError):
    """There is no such snapshot."""


class SnapshotVersionError(SnapshotMetadataError):
    """A snapshot was written in a schema that this version does not know."""


class SnapshotCorruptError(SnapshotMetadataError):
    """An object of a snapshot is missing, or its content is not what its name says."""


class UnsafeSnapshotError(SnapshotMetadataError):
    """A snapshot is well-formed but refused: a path that leads out, a device, a size out of bounds."""


class SnapshotMismatchError(SnapshotError):
    """A snapshot was to be restored with another task, agent or base image than it was made with."""


class JournalError(SnapshotError):
    """The record of an episode's calls cannot rebuild its agent."""


class NondeterministicCallError(JournalError):
    """The agent reached for the world past its container, its LLM and its event loop."""


class DivergenceError(JournalError):
    """The agent, run again against the journal, did something else than recorded."""


class RestoreError(SnapshotError):
    """The container could not be given its files back."""


class TrajectoryFormatError(AresExpError, ValueError):
    """A trajectory file cannot be read; the message names the path and the place."""
