"""The backends `container=local` (bubblewrap containers on the host's files) and `container=host` (the host itself)."""

from ares_exp.containers.local.container import LocalContainerFactory as LocalContainerFactory
