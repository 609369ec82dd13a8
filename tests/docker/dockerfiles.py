"""Dockerfiles written by tests."""

from pathlib import Path

from ares_exp.containers.container import ContainerSpec

IMAGE = "debian:bookworm-slim"


def built(context: Path, dockerfile: str) -> ContainerSpec:
    """A container of what follows on `FROM` and a label; `context` is the fixture of that name.

    The label keeps builds of tests that run at the same time from sharing layers, which the engine cannot remove well.
    """
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nLABEL test={context.name}\n{dockerfile}")
    return ContainerSpec(context.name, context_dir=context)
