"""The toolbox: pinned packages of agents, fetched once by the user's machine and mounted into containers, read-only."""
