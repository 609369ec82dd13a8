"""The toolbox: pinned packages of agents, downloaded once to the user's machine and mounted into containers."""
