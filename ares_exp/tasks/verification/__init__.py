"""Artifacts: files taken out of an agent's container when the agent is done, and given to its verifier."""
