"""Defaults for the parts of a run, such as its policy or its container factory.

A part need not inherit from its contract, such as the class `Policy`. `completed` then adds the contract's defaults.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, TypeVar

from typing_extensions import TypeIs, get_protocol_members

C = TypeVar("C")

_ABSENT = object()


def completed(part: object, contract: type[C]) -> C:
    """Returns `part` if it inherits from `contract`. Otherwise, wraps it in a view with defaults for missing members.

    Each part is completed once, when it is created. Later code can then use all members of the contract. This function
    does not check required members, which separate Protocols define (`EnvironmentSource`, `ContainerFactory`, …).
    """
    if isinstance(part, contract):
        return part
    key: Any = contract
    view: C = _view_class(key)(part)
    return view


def has_members(part: object, contract: type[C]) -> TypeIs[C]:
    """Checks whether `part` has the members of `contract`, a Protocol.

    `isinstance` checks every member in each call, which takes 15 µs before Python 3.12. This function checks each class
    once, and checks an instance only for the members that its class lacks.
    """
    kind: Any = type(part)
    key: Any = contract
    lacking = _lacking(kind, key)
    return not lacking or all(_counts(getattr(part, name, _ABSENT), name, contract) for name in lacking)


@functools.lru_cache(maxsize=1024)
def _lacking(kind: type, contract: Any) -> tuple[str, ...]:
    if contract in kind.__mro__:
        return ()
    found = {
        name: next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)
        for name in get_protocol_members(contract)
    }
    return tuple(name for name, member in found.items() if not _counts(member, name, contract))


def _counts(member: object, name: str, contract: Any) -> bool:
    """Returns whether a part has `member`. `None` in place of a method of the contract means that it is missing."""
    return member is not _ABSENT and (member is not None or not callable(getattr(contract, name, None)))


def kind_of(part: object) -> Any:
    """Returns the class of a part, or the part itself if it is a class or function.

    If the part is a `StandIn` or a `functools.partial`, uses the part or function inside it.
    """
    while isinstance(part, StandIn | functools.partial):
        part = part._part if isinstance(part, StandIn) else part.func
    return part if inspect.isclass(part) or inspect.isfunction(part) else type(part)


def name_of(part: object) -> str:
    """Returns the name of a part's class or function (see `kind_of`)."""
    return str(kind_of(part).__name__)


def import_name(part: object) -> str:
    """Returns the name of a part's class or function (see `kind_of`) with its module: `package.module.Name`."""
    kind = kind_of(part)
    return f"{kind.__module__}.{kind.__qualname__}"


class StandIn:
    """Base class of objects that wrap a part. Records and messages contain the name of the part, not of the wrapper."""

    def __init__(self, part: Any) -> None:
        self._part = part


class _View(StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._part(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            try:
                return getattr(self._part, name)
            except AttributeError:
                if inspect.getattr_static(self._part, name, None) is not None:
                    raise  # a property of the part raised this error
        return super().__getattribute__(name)


@functools.cache
def _view_class(contract: Any) -> Any:
    return types.new_class(f"Completed{contract.__name__}", (_View, contract))
