"""Dockerfiles: their parser, their steps in a running container, and plans of images without a local engine."""
