"""Images of containers: reading Dockerfiles, building images, and locks between builds."""
