"""Multi-container tasks: the services of a Docker Compose file, with `main` as the agent's container.

| module | content |
|---|---|
| `container` | `ComposeContainer`: the `Container` of such a task, and its services |
| `project` | one compose project, from its images to its removal |
| `tool` | the program `docker compose` or `docker-compose` of this machine, and the values of `$NAME`s |
| `security_policy` | keys that a task's file may not use, and limits on its containers, networks and memory |
| `project_file` | the task's file with added labels, limits, networks, images |
"""
