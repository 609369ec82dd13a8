"""Which errors are tried again, how often, and after how long."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ares_exp import errors
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.targets import instantiate_node
from ares_exp.errors import (
    AgentError,
    AresExpError,
    BudgetExhaustedError,
    ConfigError,
    ContainerDiedError,
    PolicyError,
    PolicyTimeoutError,
    RateLimitError,
    ServerError,
    VerifierTimeoutError,
)
from ares_exp.records.results import Outcome
from ares_exp.runs.retries import RetryRules


def tries(rules: RetryRules, error: BaseException, outcome: Outcome | None = None) -> int:
    """How many tries an attempt gets that always fails with that error."""
    count = 1
    while rules.wait_sec(error, outcome or Outcome.of(error), count) is not None:
        count += 1
    return count


def composed(overrides: Sequence[str]) -> RetryRules:
    return instantiate_node(compose_config(overrides), "retry")


@pytest.mark.parametrize("error", [AgentError("a"), ContainerDiedError("c"), RateLimitError("r"), OSError("e")])
def test_default_retries_no_errors(error: BaseException) -> None:
    assert tries(RetryRules(), error) == 1
    assert tries(composed([]), error) == 1


def test_outcome_decides_the_retries() -> None:
    rules = RetryRules(container_error=2, verifier_error=1, agent_error=3, errored=4)
    found = [tries(rules, one) for one in (ContainerDiedError("c"), VerifierTimeoutError("v"), AgentError("a"))]
    assert found == [3, 2, 4]
    assert tries(rules, RuntimeError("x")) == 5
    assert tries(rules, PolicyError("p")) == 1


def test_most_specific_class_takes_precedence() -> None:
    rules = RetryRules(policy_error=1, errors={"EndpointError": 2, "RateLimitError": 3, "WireFormatError": 0})
    assert tries(rules, PolicyTimeoutError("p")) == 2
    assert tries(rules, ServerError("s")) == 3
    assert tries(rules, RateLimitError("r")) == 4
    assert tries(rules, errors.MalformedResponseError("m")) == 1


def test_rules_accept_null_and_builtin_classes() -> None:
    rules = RetryRules(policy_error=1, errors={"EndpointError": 2, "ServerError": None, "TimeoutError": 5})
    assert tries(rules, ServerError("s")) == 3
    assert tries(rules, errors.EndpointTimeoutError("t")) == 3, "EndpointError comes before TimeoutError"
    assert tries(rules, PolicyTimeoutError("t")) == 6
    assert tries(rules, VerifierTimeoutError("t")) == 6
    assert tries(rules, TimeoutError("t")) == 6


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.LOST, Outcome.ABANDONED, Outcome.TRUNCATED])
def test_only_errors_are_retried(outcome: Outcome) -> None:
    rules = RetryRules(errors={"AresExpError": 9, "Exception": 9}, errored=9)
    assert tries(rules, BudgetExhaustedError("b"), outcome) == 1
    assert tries(rules, BudgetExhaustedError("b"), Outcome.ERRORED) == 10


def test_waits_grow_with_jitter_up_to_their_bound() -> None:
    rules = RetryRules(errored=100, base_sec=2.0, max_wait_sec=7.0, seed=1)
    for count, longest in [(1, 2.0), (2, 4.0), (3, 7.0), (100, 7.0)]:
        waits = [rules.wait_sec(OSError("x"), Outcome.ERRORED, count) or 0.0 for _ in range(50)]
        assert longest / 2 <= min(waits) < max(waits) <= longest
        assert len(set(waits)) > 40, "there is no jitter"


def test_seeded_waits_are_equal_and_may_be_zero() -> None:
    first, second = ([RetryRules(errored=1, seed=s).wait_sec(OSError(), Outcome.ERRORED, 1)] for s in (5, 5))
    assert first == second
    assert RetryRules(errored=1, base_sec=0).wait_sec(OSError(), Outcome.ERRORED, 1) == 0.0


def test_retry_after_is_used_up_to_the_bound() -> None:
    rules = RetryRules(policy_error=1, base_sec=1.0, max_wait_sec=60.0)
    assert rules.wait_sec(RateLimitError("r", retry_after_sec=30.0), Outcome.POLICY_ERROR, 1) == 30.0
    assert rules.wait_sec(RateLimitError("r", retry_after_sec=3600.0), Outcome.POLICY_ERROR, 1) == 60.0
    short = rules.wait_sec(RateLimitError("r", retry_after_sec=0.0), Outcome.POLICY_ERROR, 1)
    assert short is not None
    assert 0.5 <= short <= 1.0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RateLimit", "Did you mean `RateLimitError`"),
        ("ContainerDied", "`ContainerDiedError`"),
        ("print", "classes of errors, got 'print'"),
        ("KeyboardInterrupt", "got 'KeyboardInterrupt'"),
        ("__doc__", "got '__doc__'"),
    ],
)
def test_unknown_class_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=r"`retry\.errors`") as raised:
        RetryRules(errors={name: 1})
    assert hint in str(raised.value)


def test_custom_error_class_is_retried() -> None:
    class FleetError(PolicyError):
        pass

    assert tries(RetryRules(errors={"FleetError": 1}), FleetError("x")) == 2


INFRASTRUCTURE = """
    ContainerLostError ContainerStartError EnvironmentStartTimeoutError ContainerServiceUnavailableError
    ContainerQuotaError RateLimitError ServerError EndpointUnreachableError
"""
CAUSED_BY_AGENTS_AND_MODELS = """
    AgentError NoRequestError AgentSetupTimeoutError ContainerError ContainerDiedError TransferError HealthcheckError
    StepSetupError VerifierError AddTestsDirError DownloadVerifierDirError VerifierTimeoutError RewardFileNotFoundError
    RewardFileEmptyError VerifierOutputParseError PolicyError PolicyTimeoutError EndpointTimeoutError
    MalformedResponseError UnsendableRequestError QuotaError AuthenticationError ContextOverflowError RefusalError
    EndpointError ContainerAuthorizationError ContainerNotFoundError
"""


def test_infrastructure_excludes_agent_and_model_errors() -> None:
    rules = composed(["retry.infrastructure=true"])
    expected = dict.fromkeys(INFRASTRUCTURE.split(), 3) | {"OracleResponseError": 2}
    expected |= dict.fromkeys(CAUSED_BY_AGENTS_AND_MODELS.split(), 1)
    assert {name: tries(rules, getattr(errors, name)("e")) for name in expected} == expected
    assert tries(rules, OSError("e")) == 1


def test_retry_rules_are_read_from_command_line() -> None:
    rules = composed(["retry.container_error=5", "retry.errors.RateLimitError=3", "+retry.errors.WireFormatError=1"])
    found = [tries(rules, one) for one in (ContainerDiedError("c"), RateLimitError("r"), errors.WireFormatError("w"))]
    assert found == [6, 4, 2]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("retry.container_error=-1", "`retry.container_error`: .*greater than or equal to 0"),
        ("retry.errors.RateLimitError=many", "`retry.errors.RateLimitError`"),
        ("+retry.errors.RatLimitError=1", "`retry.errors` to be classes of errors, got 'RatLimitError'. Did you mean"),
        ("+retry.contaner_error=1", "no argument `contaner_error`.* Did you mean `container_error`"),
    ],
)
def test_mistakes_are_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        composed([override])


def test_every_error_class_is_in_the_drawn_tree() -> None:
    def below(kind: type[BaseException]) -> list[type[BaseException]]:
        return [found for sub in kind.__subclasses__() for found in (sub, *below(sub))]

    drawn = (Path(__file__).parents[3] / "ares_exp" / "errors.py").read_text().split('"""')[1]
    missing = [
        kind.__name__
        for kind in below(AresExpError)
        if kind.__module__ == "ares_exp.errors" and kind.__name__ not in drawn
    ]
    assert missing == []
