"""`name[@version]`: how a data set of a registry is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DatasetName:
    """Which data set is asked for.

    Attributes:
        name: Its name.
        version: The version; `None`: `head`, or the highest one.
    """

    name: str
    version: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetName:
        """Reads `name[@version]`.

        Raises:
            ValueError: It is no such text, or names a package.
        """
        name, at, version = text.partition("@")
        if "/" in name:
            raise ValueError(
                f"{text!r} is a package: these are given out by Harbor's hosted service, which is not supported. "
                "Export it as a folder of tasks (`env.path=<folder>`), or name its repository (`env.repo=org/name`)"
            )
        if not name or (at and not version):
            raise ValueError(f"expected name or name@version, got {text!r}")
        return cls(name, version or None)
