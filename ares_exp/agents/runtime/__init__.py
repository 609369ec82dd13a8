"""The runtime of an agent: its event loop, and the journal of its calls. A replay of the journal restores the agent."""
