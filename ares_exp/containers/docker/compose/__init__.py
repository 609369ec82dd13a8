"""Tasks of several containers: the services of a Docker Compose file, `main` being the agent's.

| module | what it has |
|---|---|
| `container` | `ComposeContainer`: the `Container` of such a task |
| `project` | one compose project, from before it is made until after it is removed |
| `tool` | the `docker compose` or `docker-compose` of this machine |
| `dangers`, `bounds` | what in a task's file is refused: a way out, and too much |
| `variables` | what a `$NAME` in it can stand for |
| `project_file` | the task's file made ours: labels, limits, networks, images |
| `images`, `readiness`, `removal`, `undertaker` | steps of a project's life |
"""
