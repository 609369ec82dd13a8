"""The toolbox: pinned packages of third-party agents, downloaded once and mounted read-only into containers."""
