"""The rollout service: an HTTP server that runs episodes for a trainer in another process.

`serving` is the trainer of the run. `http_service` reads requests, `bodies` has their types, and `served_rollouts` has
the state of all rollouts. `service_record` keeps this state on disk. `rollout_policies` sends the LLM calls of each
rollout to its trainer's endpoint, and `episode_lines` converts finished episodes.
"""
