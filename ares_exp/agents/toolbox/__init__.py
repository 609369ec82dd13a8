"""The toolbox: pinned packages of agents, downloaded once and mounted read-only into containers."""
