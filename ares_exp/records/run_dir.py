"""The run directory: the paths of its files, functions that write and read files safely, and the handler of `run.log`.

Files are read as untrusted input, because a run directory can belong to another user.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import itertools
import json
import logging
import math
import os
import shlex
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from ares_exp.errors import ConfigError
from ares_exp.records.secrets import mask_known_secrets

T = TypeVar("T")

EPISODES = "episodes.jsonl"
SCORES_SUFFIX = ".jsonl"
"""Suffix of the files in `scores/`. There is one file for each scorer."""
HYDRA_RECORDS = ".hydra"
"""Name of the folder in which Hydra records the config of a run."""
SWEEP_RECORD = "multirun.yaml"
"""Name of the file in which Hydra records a sweep. A folder that contains this file is the folder of a sweep."""
STOP = "stop"
"""Name of a file that stops all jobs of a sweep if it is in the sweep's folder. Users can create it with `touch`."""
RUN_FOLDERS = ("trajectories",)
RUN_FILES = ("trajectories.jsonl", "trajectories.jsonl.zst")
"""Files in which collectors store trajectories in a run directory (see `conf/collector`)."""
MAX_RECORD_BYTES = 64 * 2**20
MAX_YAML_BYTES = 4 * 2**20
"""Maximum size of a YAML file, in bytes. The files that Hydra writes for a run have a few kilobytes."""
MAX_YAML_DEPTH = 100
MAX_YAML_ERROR_CHARS = 300
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=str)
_appending = threading.Lock()
_LOCK_PAUSE_SEC = 0.001
USED = "The run directory {} already contains another run. Choose another directory with `hydra.run.dir=…`."


def dump_json(data: Any, *, indent: int | None = None) -> str:
    """Formats `data` as JSON that can be encoded as UTF-8. Masks secrets (see `mask_known_secrets`)."""
    text = _ENCODER.encode(data) if indent is None else json.dumps(data, indent=indent, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which models can generate and only escapes can represent
        text = json.dumps(data, indent=indent, ensure_ascii=True, default=str)
    return mask_known_secrets(text)


def json_text(data: Mapping[str, Any]) -> str:
    """Formats data as strict JSON, in which `null` replaces NaN and infinite numbers. Masks known secrets."""
    text = dump_json(data)
    return text if "NaN" not in text and "Infinity" not in text else dump_json(finite(data))


def finite(data: Any, *, digits: int | None = None) -> Any:
    """Copies JSON-like data. NaN and infinity become `None`. If `digits` is set, rounds floats to this many digits."""
    if isinstance(data, Mapping):
        return {str(key): finite(value, digits=digits) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value, digits=digits) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return float(f"{data:.{digits}g}") if isinstance(data, float) and digits is not None else data


@contextmanager
def atomic_file(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file for atomic writing. The file at `path` is replaced only if the block raises no exception.

    If `sync` is true, the new content survives a power cut after the block. The directory of the file must exist.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        raise
    if sync:
        sync_to_disk(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of a file atomically. After this function has returned, the content survives a power cut."""
    with atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def append_lines(path: Path, *lines: Mapping[str, Any]) -> None:
    """Appends all `lines` to a file as JSON, or none of them after an error. The appended lines survive a power cut.

    If the machine crashes during the call, the file can end with an incomplete line.

    Raises:
        OSError: The disk is full, or another write error occurred. The file is unchanged.
    """
    append_durably(path, "".join(f"{dump_json(line)}\n" for line in lines), flags=os.O_CREAT)


def append_text(path: Path | str, text: str, *, flags: int = 0) -> None:
    """Appends `text` to a file in a single write. The text survives if this process is killed, but not a power cut.

    Concurrent writes are not interleaved. Symbolic links are not followed. `flags` are additional flags for `os.open`.
    If they contain `os.O_CREAT`, the function creates a missing file and its folders.

    Raises:
        OSError: The disk is full, or another write error occurred. The file is unchanged.
    """
    descriptor = _open_to_append(path, flags)
    try:
        _write_whole(descriptor, text.encode(), path)
    finally:
        os.close(descriptor)


def append_durably(path: Path | str, text: str, *, flags: int = 0, is_new: bool = False) -> None:
    """Appends `text` like `append_text`, and syncs the file, so that the text also survives a power cut. Blocking.

    If `is_new` is set, also syncs the directory, without which a new file could disappear.

    Raises:
        OSError: The disk is full, or another write error occurred. The file is unchanged, unless another writer
            appended to the file at the same time.
    """
    data, path = text.encode(), str(path)
    descriptor = _open_to_append(path, flags)
    try:
        _write_whole(descriptor, data, path)
        if (unsynced := _unsynced.get()) is None:
            _sync_appended(descriptor, len(data))
        else:
            with suppress(OSError, AttributeError):  # later syncs then share a journal entry
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    names = [path, os.path.dirname(path) or "."] if is_new else [path]  # noqa: PTH120 - faster than a Path
    if unsynced is not None:
        unsynced.update(dict.fromkeys(names))
    elif is_new:
        sync_to_disk(names[1])


_unsynced: ContextVar[dict[str, None] | None] = ContextVar("unsynced", default=None)
"""Paths to sync when the current `syncing_together` block ends; `None` outside of such a block."""


@contextmanager
def syncing_together() -> Iterator[None]:
    """Makes `append_durably` in this block sync files only at the end of the block, so that each file is synced once.

    Raises:
        OSError: A sync failed. A power cut may lose any text that was appended in the block.
    """
    paths: dict[str, None] = {}
    token = _unsynced.set(paths)
    try:
        yield
    finally:
        _unsynced.reset(token)
    for path in paths:
        sync_to_disk(path)


class GatheredCalls(Generic[T]):
    """Collects items, and passes them in batches to a blocking function, which is called in threads.

    At most `at_once` calls run at the same time. Items that are added during these calls are passed to the next call.
    All methods must be called on the same event loop.
    """

    def __init__(self, take: Callable[[Sequence[T]], None], *, at_once: int = 1) -> None:
        self._take = take
        self._items: list[T] = []
        self._call: asyncio.Future[None] | None = None
        self._free = asyncio.Semaphore(at_once)

    def put(self, item: T) -> asyncio.Future[None]:
        """Adds an item. Returns a future that is done when the call with this item has ended.

        Do not cancel the future, because other items can be part of the same call.
        """
        self._items.append(item)
        if self._call is None or self._call.done():  # a done call was cancelled before it took items
            self._call = asyncio.ensure_future(self._called())
        return self._call

    async def _called(self) -> None:
        async with self._free:
            items, self._items, self._call = self._items, [], None
            await asyncio.to_thread(self._take, items)


def _sync_appended(descriptor: int, size: int) -> None:
    """Syncs a file. If this fails, removes the `size` bytes that were just appended, unless other text follows them."""
    try:
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if os.fstat(descriptor).st_size == end:
                os.ftruncate(descriptor, end - size)
        raise


def _write_whole(descriptor: int, data: bytes, path: Path | str) -> None:
    """Appends all of `data` to a file. If that fails, leaves the file unchanged and raises `OSError` with the path."""
    with _appending:  # removing a partial write would also remove text that another thread appended after it
        try:
            written = os.write(descriptor, data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        if written != len(data):
            os.ftruncate(descriptor, os.lseek(descriptor, -written, os.SEEK_CUR))  # the end before this write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _open_to_append(path: Path | str, flags: int) -> int:
    flags |= os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def open_regular(path: Path | str, *, flags: int = 0, dir_fd: int | None = None) -> IO[bytes]:
    """Opens a regular file for reading. Rejects pipes and devices, because reading from them could block indefinitely.

    `flags` are additional flags for `os.open`, such as `os.O_NOFOLLOW`. If `dir_fd` is set, `path` is relative to this
    open directory.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_record(path: Path, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Returns the content of a regular file as bytes.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ConfigError: The file is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise broken(path, f"at most {max_bytes:,} bytes", "a larger file")
    return data


def read_tail(path: Path, max_bytes: int) -> bytes:
    """Returns the last bytes of a regular file, at most `max_bytes`. Raises `OSError` if it cannot be read."""
    with open_regular(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - max_bytes, 0))
        return file.read(max_bytes)


def read_json_object(path: Path, *, max_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Reads a file that contains a JSON object.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ConfigError: The file is too large, nested too deeply, not valid JSON, or not an object.
    """
    try:
        found = json.loads(read_record(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as error:
        raise broken(path, "JSON", f"invalid JSON ({error})") from error
    if not isinstance(found, dict):
        raise broken(path, "an object", f"a {type(found).__name__}")
    return found


def read_yaml(path: Path) -> Any:
    """Reads a YAML file.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ConfigError: The file is too large, nested too deeply, contains aliases, or is not valid YAML.
    """
    import yaml

    text = read_record(path, max_bytes=MAX_YAML_BYTES)
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    try:
        for event in yaml.parse(text, Loader=loader):  # checked first, because deep nesting crashes the C loader
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH or isinstance(event, yaml.AliasEvent):
                raise broken(path, f"at most {MAX_YAML_DEPTH} levels and no aliases", "an alias or more levels")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise broken(path, "YAML", f"invalid YAML ({' '.join(str(error).split())[:MAX_YAML_ERROR_CHARS]})") from error


def broken(path: Path, expected: str, got: str) -> ConfigError:
    """Creates the error that reports a file with invalid content."""
    return ConfigError(f"{path} is broken: expected {expected}, got {got}.")


def sync_to_disk(path: Path | str) -> None:
    """Makes the content of a file, or the list of files in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache  # Hydra resolves the directory several times
def fresh_dir(path: str) -> str:
    """Creates a new directory for a run: `path` or, if it exists, `path_2`, `path_3` and so on. Returns its path."""
    for number in itertools.count(1):
        candidate = path if number == 1 else f"{path}_{number}"
        try:
            Path(candidate).mkdir(parents=True)
        except FileExistsError:
            continue
        return candidate
    raise AssertionError


def refuse_used_run_dir(argv: Sequence[str]) -> str | None:
    """Checks the overrides `hydra.run.dir=…` and `name=…` before Hydra creates a directory from them.

    Returns an error message for the user if the directory contains another run or cannot be used; `None` otherwise.
    """
    if "resume=true" in (argument.lstrip("+").lower() for argument in argv):
        return None
    for argument in argv:
        key, _, value = argument.partition("=")
        if key == "name" and "/" in value:
            return f"Expected `name` to be a folder name without slashes, got {value!r:.200}."
        if key != "hydra.run.dir":
            continue
        try:
            if is_file(Path(value.strip("'\"")) / EPISODES):
                return USED.format(value)
        except OSError as error:  # no permission, or the name is too long
            return f"Cannot write a run to {value:.200}: {error.strerror}. Set another `hydra.run.dir=…`."
    return None


def is_file(path: Path) -> bool:
    """Returns whether `path` is a regular file.

    Raises:
        OSError: The path cannot be checked, for example because of missing permissions. This function exists because
            `Path.is_file` does not raise this error in Python 3.14 and newer.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except ValueError:  # the path contains a NUL character
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def is_plain_file(path: Path) -> bool:
    """Returns whether `path` is a regular file and not a symbolic link."""
    return path.is_file() and not path.is_symlink()


def plain_files(folder: Path) -> list[Path]:
    """Returns the regular files below a folder, sorted. Ignores links, because they may lead out of the folder."""
    walk = () if folder.is_symlink() else os.walk(folder)
    paths = sorted(Path(directory, name) for directory, _, names in walk for name in names)
    return [path for path in paths if is_plain_file(path)]


def lock(descriptor: int, path: Path, *, what: str = "run") -> None:
    """Locks an open file or folder against other processes, until it is closed or this process ends.

    Does nothing if the file system does not support locks. `path` and `what` are for the error message.

    Raises:
        ConfigError: Another process holds the lock.
    """
    with suppress(OSError):  # a file system without such locks
        if not try_lock(descriptor, fcntl.LOCK_EX):
            raise ConfigError(f"The {what} in {path} is running in another process. Wait until the process has ended.")


def try_lock(descriptor: int, kind: int, *, wait_sec: float = 0.0) -> bool:
    """Locks an open file or folder, until it is closed or this process ends. Blocking.

    Args:
        descriptor: Descriptor of the file or folder.
        kind: `fcntl.LOCK_EX`, or `fcntl.LOCK_SH` for a lock that several processes can hold.
        wait_sec: Maximum time in seconds to wait for another process that holds the lock.

    Returns:
        Whether the lock was acquired.

    Raises:
        OSError: The file system does not support locks.
    """
    give_up = time.monotonic() + wait_sec
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(_LOCK_PAUSE_SEC)
        else:
            return True


def is_run(folder: Path) -> bool:
    """Returns whether a folder is a run directory."""
    return any((folder / name).exists() for name in (EPISODES, *RUN_FOLDERS, *RUN_FILES))


def is_sweep(folder: Path) -> bool:
    """Returns whether a folder is the folder of a sweep, not of a run."""
    return (folder / SWEEP_RECORD).is_file() and not is_run(folder)


def resume_command(run_dir: Path, shown: Path | None = None) -> str:
    """Returns the command with which a user can resume a run. If `shown` is set, it is the path in this command."""
    program = "ares-exp serve" if RunDir(run_dir).service.is_dir() else "ares-exp"
    return f"{program} resume={shlex.quote(str(shown or run_dir))}"


class RunDir:
    """The directory of one run, and the paths of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.provenance = path / "provenance.json"
        self.episodes = path / EPISODES
        self.summary = path / "summary.json"
        self.results = path / "results.json"
        self.trajectories = path / "trajectories"
        self.files = path / "files"
        self.scores = path / "scores"
        self.responses = path / "responses"
        self.sessions = path / "sessions.jsonl"
        self.snapshots = path / "snapshots"
        self.branch_point = path / "branch_point"
        self.replay = path / "replay.json"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.service = path / "service"
        self.log = path / "run.log"
        self.status = path / "status.json"
        self.control = path / "control"
        self.orders = path / "control.jsonl"

    @property
    def has_run(self) -> bool:
        """Whether a run was started in the directory. A run that was killed before it wrote its config is ignored."""
        return self.config.exists()

    @contextmanager
    def owned(self, *, resume: bool = False) -> Iterator[None]:
        """Creates the directory and its `episodes.jsonl`. Locks the directory against other processes during the block.

        Raises:
            ConfigError: The directory contains another run (unless it is resumed), is used by another process, is not
                writable, or contains links instead of folders.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            descriptor = os.open(
                self.episodes, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if resume else os.O_EXCL), 0o644
            )
        except FileExistsError:
            raise ConfigError(USED.format(self.path)) from None
        except OSError as error:
            raise ConfigError(f"Cannot write to the run directory {self.path}: {error.strerror}.") from None
        try:
            lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)

    def _refuse_links(self) -> None:
        """Raises `ConfigError` if a folder of the run is a link, because a run deletes files in its folders."""
        folders = (
            *(self.trajectories, self.files, self.responses, self.snapshots, self.branch_point, self.tensorboard),
            *(self.control, self.scores, self.service),
        )
        if links := [path.name for path in folders if path.is_symlink()]:
            raise ConfigError(
                f"The run directory {self.path} contains links instead of folders: {', '.join(links)}. Replace the "
                "links with their targets, or set `hydra.run.dir=…` to a directory on a disk with enough space."
            )

    def discard(self) -> None:
        """Removes the directory of a run that was rejected before it started, including Hydra's files and the log.

        Keeps the directory if it contains a run or other files.
        """
        if self.episodes.exists() or self.config.exists():
            return
        hydra = self.path / HYDRA_RECORDS
        for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
            (hydra / name).unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        folders = [hydra, self.path]
        if self.path.parent.parent.name == "outputs":  # the default location: outputs/NAME/TIME
            folders += [self.path.parent, self.path.parent.parent]
        for folder in folders:
            if folder.resolve() != Path.cwd() and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def sweep_up(self) -> None:
        """Removes the temporary files that killed processes have left in the run directory.

        Only the process that owns the directory may call this method. Does not search the folders that contain files of
        tasks, snapshots or trackers.
        """
        others = (self.files, self.snapshots, self.branch_point, self.tensorboard, self.path / "wandb")
        folders = [path for path in self.path.iterdir() if path.is_dir() and not path.is_symlink()]
        for folder in (self.path, *(folder for folder in folders if folder not in others)):
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def write_json(self, path: Path, data: Mapping[str, Any]) -> None:
        """Writes `data` as indented JSON to `path`, atomically."""
        write_atomically(path, dump_json(data, indent=2) + "\n")

    def append_episodes(self, *rows: str) -> None:
        """Appends rows to `episodes.jsonl`, which `owned` has created. Each row is a text from `dump_json`.

        Raises:
            OSError: The disk is full, the file is missing, or another write error occurred. The file is unchanged.
        """
        append_durably(self.episodes, "".join(f"{row}\n" for row in rows))


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Creates a directory that appears under its final name `out` only when it is complete.

    Yields a temporary directory next to `out`, and renames it to `out` if the block raises no exception.

    Raises:
        ConfigError: `out` already exists.
        OSError: The directory cannot be created.
    """
    if os.path.lexists(out):
        raise ConfigError(f"The directory {out} already exists. Choose another directory.")
    place = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.tmp")
    place.mkdir(parents=True)
    try:
        yield place
        place.rename(out)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    sync_to_disk(out.absolute().parent)


class RunLogHandler(logging.FileHandler):
    """The log handler for `run.log`. It ignores write errors, so that a full disk does not make an episode fail.

    The handler does not follow links, because the directory of a resumed run is untrusted.
    """

    def _open(self) -> TextIOWrapper:
        return open(  # type: ignore[return-value]
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666),
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a log record. Passes write errors to `handleError` instead of raising them."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)


DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_beneath(root: int, path: str) -> Iterator[int]:
    """Opens the directory `path` below the open directory `root` without following links. Yields its file descriptor.

    `path` has the form `/a/b` and contains no `..`. An empty `path` means `root` itself.

    Raises:
        OSError: The directory is missing, or a component of the path is a link or not a directory.
    """
    directory = os.dup(root)
    try:
        for name in path.split("/")[1:]:
            inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)
