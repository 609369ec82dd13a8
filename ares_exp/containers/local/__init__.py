"""The backends `container=local` (bubblewrap containers on the host's files) and `container=host` (the host itself)."""

from ares_exp.containers.local.factory import LocalContainerFactory as LocalContainerFactory
