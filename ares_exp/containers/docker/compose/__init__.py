"""Multi-container tasks: the services of a Docker Compose file, with `main` as the agent's container."""
