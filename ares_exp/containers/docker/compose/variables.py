"""The values of `$NAME`s in a task's compose file.

The compose program fills them in from its environment. Ours is not passed on, as a file could copy any API key into a
container. It gets the variables of the task (`[environment.env]`) and those that Harbor defines.
"""

from __future__ import annotations

import re

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.compose.project_file import MAIN
from ares_exp.containers.docker.compose.tool import outer_environment
from ares_exp.containers.images.image import image_tag
from ares_exp.errors import UnsupportedTaskError

# Variables that control programs of this machine: a task must not set them.
_OBEYED = re.compile(
    r"""(?x) PATH | HOME | SHELL | ENV | IFS | PS4 | CDPATH | TZ | TZDIR | LANG | LANGUAGE | TERM | TMP | TEMP | TMPDIR
    | SHELLOPTS | BASHOPTS | HOSTALIASES | RES_OPTIONS | LOCALDOMAIN | NLSPATH | LOCPATH | GCONV_PATH | .*_CA_BUNDLE
    | GODEBUG | GOGC | GOMAXPROCS | GOMEMLIMIT | GOTRACEBACK | GOCOVERDIR | PYTHON.* | .*_(?i:proxy)
    | (LD|DYLD|GIT|DOCKER|COMPOSE|BUILDKIT|BUILDX|SSL|SSH|OPENSSL|XDG|OTEL|GLIBC|MALLOC|LC|BASH)_.*"""
)
_REQUEST_SEC = "120"  # version 1 gives up on the engine after 60


def refuse_obeyed(spec: ContainerSpec, text: str) -> None:
    """Refuses a file that uses variables that are not filled in. They may be set in its containers.

    Args:
        spec: The spec, with the task's variables.
        text: The compose file's text.

    Raises:
        UnsupportedTaskError: With their names.
    """
    found = [name for name in spec.env if _OBEYED.fullmatch(name) and re.search(rf"\$\{{?{re.escape(name)}\b", text)]
    if found:
        raise UnsupportedTaskError(
            f"{spec.compose_file}: expected no $NAME for variables of [environment.env] that programs of this machine "
            f"obey, got {', '.join(found)}. Give them other names, or leave the task out."
        )


def variables(spec: ContainerSpec, host: str) -> dict[str, str]:
    """Returns the environment of the compose program. Blocking: reads the build context.

    Args:
        spec: The task's container.
        host: As `Engine.host`.
    """
    assert spec.compose_file is not None
    env = {name: value for name, value in spec.env.items() if not _OBEYED.fullmatch(name)}
    context = spec.context_dir or spec.compose_file.parent
    env["CONTEXT_DIR"] = str(context)
    env["MAIN_IMAGE_NAME"] = spec.docker_image or image_tag(f"{spec.name}-{MAIN}", context)
    env |= {"PREBUILT_IMAGE_NAME": spec.docker_image} if spec.docker_image else {}
    env |= {"CPUS": f"{spec.cpus:g}"} if spec.cpus is not None else {}
    env |= {"MEMORY": f"{spec.memory_mb}M"} if spec.memory_mb is not None else {}
    return {**env, **outer_environment(), "DOCKER_HOST": host, "COMPOSE_HTTP_TIMEOUT": _REQUEST_SEC}
