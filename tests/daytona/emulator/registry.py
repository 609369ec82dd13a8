"""Finds sandboxes by id, by name and by label, without a look at the others."""

from __future__ import annotations

from tests.daytona.emulator.sandbox import Sandbox
from tests.daytona.emulator.wire import Refusal


class Registry:
    """The sandboxes that are there.

    Attributes:
        by_id: In the order of their creation.
        by_name: Those that are not being destroyed.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Sandbox] = {}
        self.by_name: dict[str, Sandbox] = {}
        self._by_label: dict[tuple[str, str], dict[str, Sandbox]] = {}
        self._count = 0

    def add(self, sandbox: Sandbox, labels: dict[str, str]) -> None:
        """Takes one in."""
        self._count += 1
        sandbox.number = self._count
        self.by_id[sandbox.id] = self.by_name[sandbox.name] = sandbox
        sandbox.labels = labels
        for pair in labels.items():
            self._by_label.setdefault(pair, {})[sandbox.id] = sandbox

    def hide(self, sandbox: Sandbox) -> None:
        """From now on it is found by its id alone."""
        if self.by_name.get(sandbox.name) is sandbox:
            del self.by_name[sandbox.name]
        for pair in sandbox.labels.items():
            self._by_label.get(pair, {}).pop(sandbox.id, None)

    def get(self, id_or_name: str) -> Sandbox | None:
        """The sandbox of that id or name, if there is one."""
        return self.by_id.get(id_or_name) or self.by_name.get(id_or_name)

    def find(self, id_or_name: str) -> Sandbox:
        """The sandbox of that id or name.

        Raises:
            Refusal: There is none.
        """
        found = self.get(id_or_name)
        if found is None:
            raise Refusal(404, f"Sandbox with ID or name {id_or_name} not found")
        return found

    def with_labels(self, labels: dict[str, str]) -> dict[str, Sandbox]:
        """By id, those that have all of these labels, and perhaps others with one of them."""
        groups = [self._by_label.get(pair, {}) for pair in labels.items()]
        return min(groups, key=len, default=self.by_id)
