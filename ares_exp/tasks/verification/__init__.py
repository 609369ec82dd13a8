"""Verification of a task: commands before and after the agent, the verifier, its rewards, and artifacts."""
