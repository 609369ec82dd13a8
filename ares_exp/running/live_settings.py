"""Settings that can change while a run is under way: those that change no result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ares_exp.errors import ConfigError, close_matches
from ares_exp.policies.policy import Policy
from ares_exp.records.validation import explain_validation
from ares_exp.running.budget import Budget
from ares_exp.running.retries import RetryRules

GROUPS = ("budget", "retry", "policy")
KEYS = ("concurrency", "budget.…", "retry.…", "policy.max_concurrency")

Change = Callable[[], None]
_BUDGET = TypeAdapter(Budget)


@dataclass(kw_only=True)
class LiveSettings:
    """What is changed, and how.

    Attributes:
        budget: The budget in force.
        retry: The rules in force.
        policy: Answers the requests.
        resize: Changes the number of episodes at once; raises `ConfigError` where the parts cannot take it.
        set_budget: Puts a budget in force.
        set_retry: Puts rules in force.
    """

    budget: Budget
    retry: RetryRules
    policy: Policy
    resize: Callable[[int], Change]
    set_budget: Callable[[Budget], None]
    set_retry: Callable[[RetryRules], None]

    def set(self, values: Mapping[str, Any]) -> None:
        """Changes all of them, or none.

        Raises:
            ConfigError: One of them cannot change, or not to that value.
        """
        by_group: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            group, _, name = key.partition(".")
            by_group.setdefault(group if name else "", {})[name or key] = value
        try:
            changes = [change for group, own in by_group.items() for change in self._changes(group, own)]
        except ValidationError as error:
            raise ConfigError(f"Cannot set {', '.join(values)}: {explain_validation(error)}.") from None
        for change in changes:
            change()

    def _changes(self, group: str, values: Mapping[str, Any]) -> list[Change]:
        if group == "budget":
            return [self._budget(values)]
        if group == "retry":
            return [self._retry(self.retry.changed(values))]
        if group == "policy":
            return [self.policy.adjust(name, value) for name, value in values.items()]
        return [self._own(f"{group}.{name}" if group else name, value) for name, value in values.items()]

    def _budget(self, values: Mapping[str, Any]) -> Change:
        data = asdict(self.budget)
        for name, value in values.items():
            group, _, shared = name.partition(".")
            place = data["sweep"] if group == "sweep" and shared else data
            if (shared or name) not in place or name == "sweep":
                raise ConfigError(f"There is no `budget.{name}`.{close_matches(name, data)}")
            place[shared or name] = value
        budget = _BUDGET.validate_python(data)

        def change() -> None:
            self.budget = budget
            self.set_budget(budget)

        return change

    def _retry(self, rules: RetryRules) -> Change:
        def change() -> None:
            self.retry = rules
            self.set_retry(rules)

        return change

    def _own(self, key: str, value: Any) -> Change:
        if key != "concurrency":
            raise ConfigError(
                f"`{key}` cannot change while the run goes on; what can: {', '.join(KEYS)}, `policy.max_retries`. Keys "
                "that change no result may differ with `resume=`; others need a run of their own."
            )
        if type(value) is not int or value < 1:
            raise ConfigError(f"Expected `concurrency` to be a positive int, got {value!r:.80}.")
        return self.resize(value)
