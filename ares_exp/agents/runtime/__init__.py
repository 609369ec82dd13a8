"""The runtime of an agent: its event loop, and the journal of calls from which the agent can be run again."""
