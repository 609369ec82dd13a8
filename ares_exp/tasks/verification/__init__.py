"""Verification of tasks: set-up before the agent, the tests and rewards after it, and the artifacts to keep."""
