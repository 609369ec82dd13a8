"""Tarballs from the npm registry that the user's npm is configured for, fetched without npm and its scripts."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from ares_exp.agents.toolbox.package import NpmTarball
from ares_exp.containers.archive import remove, unpack_directory
from ares_exp.errors import ToolboxError, TransferError

DEFAULT_REGISTRY = "https://registry.npmjs.org"
_TRIES = 4
_CHUNK = 256 * 1024
_MAX_FILES = 20_000
_SILENCE_SEC = 60.0
_CONFIG_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class NpmConfig:
    """What the user's npm is configured for, as far as a download needs it.

    Attributes:
        options: Keys and values of `.npmrc`, those of the environment laid over them.
    """

    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_user(cls) -> NpmConfig:
        """Reads the user's `.npmrc` and the variables `npm_config_…`."""
        variables = {name.lower(): value for name, value in os.environ.items() if value}
        path = Path(variables.get("npm_config_userconfig") or "~/.npmrc").expanduser()
        try:
            text = path.read_bytes()[:_CONFIG_BYTES].decode("utf-8", "replace")
        except OSError:
            text = ""
        options = {}
        for line in text.splitlines():
            key, equals, value = line.strip().partition("=")
            if equals and key[:1] not in ("#", ";"):
                options[key.strip()] = _expanded(value.strip().strip("\"'"))
        for name, value in variables.items():
            if name.startswith("npm_config_"):
                options[name.removeprefix("npm_config_").replace("_", "-")] = value
        return cls(options)

    def registry(self, package: str) -> str:
        """Returns the address of the registry of a package, without a slash at the end."""
        scope = package.partition("/")[0] if package.startswith("@") else ""
        address = self.options.get(f"{scope}:registry") or self.options.get("registry") or DEFAULT_REGISTRY
        return address.rstrip("/")

    def authorization(self, address: str) -> str | None:
        """Returns the header that a registry's address asks for, if the user has a token for it."""
        parts = urlsplit(address)
        place = f"//{parts.netloc}{parts.path.rstrip('/')}/"
        while place.count("/") > 2:
            if token := self.options.get(f"{place}:_authToken"):
                return f"Bearer {token}"
            if basic := self.options.get(f"{place}:_auth"):
                return f"Basic {basic}"
            place = f"{place.rstrip('/').rpartition('/')[0]}/"
        return None


def fetch_tarball(
    tarball: NpmTarball, target: Path, scratch: Path, *, stop: threading.Event, config: NpmConfig | None = None
) -> None:
    """Fetches, checks and unpacks a tarball. Nothing of it is run.

    Args:
        tarball: What is pinned of it.
        target: The directory that its files go to.
        scratch: A directory for the download.
        stop: When it is set, the download ends.
        config: The configuration of npm; by default the user's.

    Raises:
        ToolboxError: It cannot be had, or is not what its digest says.
    """
    config = config or NpmConfig.of_user()
    registry = config.registry(tarball.package)
    address = f"{registry}/{quote(tarball.path, safe='@/')}"
    if urlsplit(address).scheme not in ("https", "http"):
        raise ToolboxError(f"Expected npm's registry to be an https:// address, got {registry}. Set `npm config set "
                           "registry https://…`.")  # fmt: skip
    file = scratch / "download.tgz"
    _download(tarball, address, file, config, stop)
    try:
        with gzip.open(file, "rb") as stream:
            unpack_directory(
                stream,  # type: ignore[arg-type]  # read(size) is all it needs
                target,
                strip_root=True,
                max_bytes=tarball.unpacked,
                max_members=_MAX_FILES,
            )
    except (TransferError, EOFError, gzip.BadGzipFile) as error:
        raise ToolboxError(
            f"{tarball.package} {tarball.version} from {registry} cannot be unpacked: {error}"
        ) from error
    file.unlink()
    for name in tarball.left_out:
        remove(target / name)
    for name in tarball.executables:
        if not (target / name).is_file():
            raise ToolboxError(f"Expected {tarball.package} {tarball.version} to have the file {name}, found none.")
        (target / name).chmod(0o755)


def _download(tarball: NpmTarball, address: str, file: Path, config: NpmConfig, stop: threading.Event) -> None:
    """Downloads it, again after a connection that broke; refuses everything but the pinned bytes."""
    problem = ""
    for number in range(_TRIES):
        if stop.wait((2**number - 1) / 2):
            break
        try:
            found = _download_once(tarball, address, file, config, stop)
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
            continue
        except (OSError, http.client.HTTPException) as error:
            problem = str(error.reason if isinstance(error, urllib.error.URLError) else error) or type(error).__name__
            continue
        if found == tarball.integrity:
            return
        raise ToolboxError(
            f"Expected {address} to have the digest {tarball.integrity}, got {found}. It is not the file that was "
            "pinned, so nothing was installed. Ask whoever runs that registry, or set another with `npm config set "
            "registry https://registry.npmjs.org/`."
        )
    if stop.is_set():
        raise ToolboxError(f"The download of {tarball.package} {tarball.version} was stopped.")
    raise ToolboxError(
        f"{tarball.package} {tarball.version} cannot be fetched from {address}: {problem}. Nothing was installed. "
        "Check the network and its proxy (HTTPS_PROXY), or name a registry that can be reached: `npm config set "
        "registry https://…`, or the variable npm_config_registry."
    )


def _download_once(tarball: NpmTarball, address: str, file: Path, config: NpmConfig, stop: threading.Event) -> str:
    """Downloads it once; returns its digest. At most one byte more than it should have is read.

    Raises:
        OSError, http.client.HTTPException: The connection broke, or it ended early.
    """
    request = urllib.request.Request(address, headers={"User-Agent": "ares-exp", "Accept-Encoding": "identity"})
    if header := config.authorization(address):
        request.add_unredirected_header("Authorization", header)  # the token is for this host alone
    digest, size = hashlib.sha512(), 0
    with _opener(config).open(request, timeout=_SILENCE_SEC) as response, file.open("wb") as out:
        while chunk := response.read(min(_CHUNK, tarball.size + 1 - size)):
            digest.update(chunk)
            out.write(chunk)
            size += len(chunk)
            if size > tarball.size:
                break
            if stop.is_set():
                raise OSError("stopped")
        if size < tarball.size and response.headers.get("Content-Length") not in (None, str(size)):
            raise http.client.IncompleteRead(b"", tarball.size - size)
    return f"sha512-{base64.b64encode(digest.digest()).decode()}"


def _opener(config: NpmConfig) -> urllib.request.OpenerDirector:
    authority = config.options.get("cafile") or None
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ToolboxError(
            f"Expected npm's `cafile` to be a readable file, got {authority}: {error.strerror}."
        ) from error
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))


def _expanded(value: str) -> str:
    """Puts in variables, as npm does: `${NAME}`."""
    return re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], found[0]), value)
