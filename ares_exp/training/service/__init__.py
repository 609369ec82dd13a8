"""The rollout service: an HTTP server that runs episodes for a trainer in another process.

Inside this process, `serving` takes the place of a trainer, and reads requests, whose types are in `bodies`.
`served_rollouts` has the state of all rollouts, and `service_record` stores it on disk. `rollout_policies` sends the
LLM calls of each rollout to its trainer. `bodies` also converts finished episodes to JSON.
"""
