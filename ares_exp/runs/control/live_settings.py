"""Settings that can change in a running run: the ones that change no result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ares_exp.errors import ConfigError, close_matches
from ares_exp.policies.policy import Policy
from ares_exp.records.validation import explain_validation
from ares_exp.runs.budget import Budget
from ares_exp.runs.retries import RetryRules

KEYS = ("concurrency", "budget.…", "retry.…", "policy.max_concurrency", "policy.max_retries")

Change = Callable[[], None]
_BUDGET = TypeAdapter(Budget)


@dataclass(kw_only=True)
class LiveSettings:
    """The current settings, and the functions that change them.

    Attributes:
        budget: The current budget.
        retry: The current rules.
        policy: The policy of the run.
        resize: Checks a number of episodes at once, and returns the function that applies it.
        on_budget: Applies a budget.
        on_retry: Applies rules.
    """

    budget: Budget
    retry: RetryRules
    policy: Policy
    resize: Callable[[int], Change]
    on_budget: Callable[[Budget], None]
    on_retry: Callable[[RetryRules], None]

    def set(self, values: Mapping[str, Any]) -> None:
        """Changes all of them, or none.

        Raises:
            ConfigError: One of the keys cannot change, or not to that value.
        """
        try:
            changes = self._changes(values)
        except ValidationError as error:
            raise ConfigError(f"Cannot set {', '.join(values)}: {explain_validation(error)}.") from None
        for change in changes:
            change()

    def _changes(self, values: Mapping[str, Any]) -> list[Change]:
        budget, retry, changes = dict[str, Any](), dict[str, Any](), list[Change]()
        for key, value in values.items():
            group, _, name = key.partition(".")
            if group == "budget" and name:
                budget[name] = value
            elif group == "retry" and name:
                retry[name] = value
            elif group == "policy" and name:
                changes.append(self.policy.adjust(name, value))
            elif key != "concurrency":
                raise ConfigError(
                    f"`{key}` cannot change in a running run. Use one of {', '.join(KEYS)}. Other keys that change no "
                    "result may differ with `resume=`; all others need a new run."
                )
            elif type(value) is not int or value < 1:
                raise ConfigError(f"Expected `concurrency` to be a positive int, got {value!r:.80}.")
            else:
                changes.append(self.resize(value))
        if budget:
            changes.append(partial(self._set_budget, self._new_budget(budget)))
        if retry:
            changes.append(partial(self._set_retry, self.retry.changed(retry)))
        return changes

    def _new_budget(self, values: Mapping[str, Any]) -> Budget:
        data = asdict(self.budget)
        for name, value in values.items():
            group, _, shared = name.partition(".")
            place = data["sweep"] if group == "sweep" and shared else data
            if (shared or name) not in place or name == "sweep":
                raise ConfigError(f"There is no `budget.{name}`.{close_matches(name, data)}")
            place[shared or name] = value
        return _BUDGET.validate_python(data)

    def _set_budget(self, budget: Budget) -> None:
        self.budget = budget
        self.on_budget(budget)

    def _set_retry(self, rules: RetryRules) -> None:
        self.retry = rules
        self.on_retry(rules)
