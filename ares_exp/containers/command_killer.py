"""Killing of a command's processes, from another shell, at its time limit or cancellation.

Commands that end at about the same time share one kill script (`shell_script.kill_script`): otherwise the killers of a
hundred episodes cancelled together would stop each other.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from functools import partial

from ares_exp.containers.container import User
from ares_exp.containers.shell_channel import BoundedOutput, Channel, ScriptRun
from ares_exp.containers.shell_pool import ShellPool
from ares_exp.containers.shell_script import kill_script
from ares_exp.errors import ContainerDiedError, ContainerError

# A killed tree is gone within milliseconds; the rest is for a loaded machine. First one try, then all together.
_KILL_SEC = 2.0

END_SEC = 8.0
"""Bound on killing a command after its time limit."""

_logger = logging.getLogger(__name__)


class CommandKiller:
    """Kills the commands of one container."""

    def __init__(self, shells: ShellPool, root: User | None) -> None:
        """Args: root: The user who may kill all processes; `None` when that is the default user."""
        self._shells = shells
        self._root = root
        self._doomed: dict[User | None, set[tuple[str, int]]] = collections.defaultdict(set)
        self._lock = asyncio.Lock()

    async def end(self, channel: Channel, run: ScriptRun, exec_id: str) -> None:
        """Kills the processes of a command and collects its output; closes the channel if that fails.

        Args:
            channel: Where it runs, or would have run.
            run: The command there.
            exec_id: The id in the environment of its processes.

        Raises:
            ContainerDiedError: The container is gone.
        """
        if self._shells.is_closed:
            return
        root = run.pid or channel.shell.pid  # the latter has the script, and might still start it
        if not run.pid:
            channel.close()  # else the kill could hit the channel's next command
        try:
            async with asyncio.timeout(END_SEC):
                for _ in range(2):  # the first may precede the environment of the command's first process
                    await self.kill(channel.user, exec_id, root)
                    await asyncio.wait({channel.ready}, timeout=_KILL_SEC / 4)
                    if channel.run is not run or not channel.is_open:
                        return
        except TimeoutError:
            pass  # the engine does not answer; the next command reports it
        except ContainerDiedError:
            raise
        except ContainerError as error:
            raise ContainerDiedError(f"The container is lost: a command in it could not be killed. {error}") from error
        finally:
            if channel.run is run:
                channel.close()

    async def kill(self, user: User | None, exec_id: str, root: int) -> None:
        """Kills the processes of a command, together with those of all other commands waiting to be killed.

        Args:
            user: Who runs the command.
            exec_id: The id in the environment of its processes.
            root: The process above all of them; 0 if unknown.

        Raises:
            ContainerError: No shell for the kill script can be opened.
        """
        waiting, own = self._doomed[user], (exec_id, root)
        waiting.add(own)
        try:
            async with self._lock:
                if own not in waiting:  # an earlier caller has killed it as well
                    return
                doomed = frozenset(waiting)
                exec_ids, pids = {one for one, _ in doomed}, {pid for _, pid in doomed if pid}
                word = await self._run_kill_script(user, exec_ids, pids)
                if word not in ("", "0") and user != self._root:  # sudo has made some of them root's
                    word = await self._run_kill_script(self._root, exec_ids, pids)
                if word:
                    waiting -= doomed
                if word != "0":
                    _logger.warning("Some processes of a killed command may still run in the container.")
        finally:
            waiting.discard(own)

    async def _run_kill_script(self, user: User | None, exec_ids: set[str], pids: set[int]) -> str:
        """Returns the script's exit code; empty when no shell answered."""
        for take in (partial(self._shells.take, urgent=True), self._shells.open):
            channel = await take(user)
            run = channel.start(BoundedOutput(0))
            await channel.play(run, lambda key, _: kill_script(exec_ids, pids, key=key), _KILL_SEC)
            if run.word:
                return run.word
            for one in (channel, *self._shells.idle(user)):  # it died while idle: so did the others, probably
                one.close()
        return ""
