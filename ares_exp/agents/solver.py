"""The agent of runs that carry out the solutions of their tasks."""

from __future__ import annotations

import functools

from ares_exp.agents.code_agent import AgentFactoryBase, as_agent_factory


def playing_agent(agents: AgentFactoryBase, *, plays_solutions: bool) -> AgentFactoryBase:
    """Returns who plays: solutions need no program of others, and the shell agent carries them out.

    Args:
        agents: The agent that was chosen.
        plays_solutions: Whether the policy plays the tasks' solutions.
    """
    return _solver() if plays_solutions and agents.needs_forwarded_port else agents


@functools.cache
def _solver() -> AgentFactoryBase:
    from ares_exp.agents.shell_agent import ShellAgentFactory

    return as_agent_factory(ShellAgentFactory())
