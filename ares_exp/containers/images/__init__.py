"""Images of containers: Dockerfile parsing, image builds, and locks between builds."""
