"""`container=docker`: containers of a Docker engine."""

from ares_exp.containers.docker.factory import DockerContainerFactory as DockerContainerFactory
