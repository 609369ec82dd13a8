"""The backend `container=local`: bubblewrap containers on the host's own root."""

from ares_exp.containers.local.factory import LocalContainerFactory

__all__ = ["LocalContainerFactory"]
