"""Verification of tasks: commands before and after the agent, the verifier, rewards and artifacts."""
