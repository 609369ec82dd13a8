"""The end of a command that a time limit or a cancellation ends: all its processes are killed, from another shell.

The commands that are to end at about the same time share one kill script (`shell_script.kill_script`): a hundred
episodes that are cancelled together do not stop each other's killers.
"""

from __future__ import annotations

import asyncio
import collections
import logging

from ares_exp.containers.container import User
from ares_exp.containers.shell_channel import Channel, ScriptRun
from ares_exp.containers.shell_output import BoundedOutput
from ares_exp.containers.shell_script import kill_script
from ares_exp.containers.shell_stock import ShellStock
from ares_exp.errors import ContainerDiedError, ContainerError

# A killed tree is gone within milliseconds; the rest is for a loaded machine. First one try, then all together.
_KILL_SEC = 2.0

END_SEC = 8.0
"""How long the killing of a command is waited for, once its time limit has passed."""

_logger = logging.getLogger(__name__)


class CommandKiller:
    """Ends the commands of one container."""

    def __init__(self, shells: ShellStock, root: User | None) -> None:
        """Starts nothing.

        Args:
            shells: The container's.
            root: The user who may end everybody's processes; `None` when that is the default one.
        """
        self._shells = shells
        self._root = root
        self._doomed: dict[User | None, set[tuple[str, int]]] = collections.defaultdict(set)
        self._lock = asyncio.Lock()

    async def end(self, channel: Channel, run: ScriptRun, exec_id: str) -> None:
        """Kills what a command started and collects what it had printed; closes the channel if that fails.

        Args:
            channel: Where it runs, or was to.
            run: The command there.
            exec_id: What its processes carry in their environment.

        Raises:
            ContainerDiedError: The container is gone.
        """
        if self._shells.is_closed:
            return
        root = run.pid or channel.box.pid  # the latter has the script, and might still begin it
        if not run.begun:
            channel.close()  # else another command could be running in it by the time that it is killed
        try:
            async with asyncio.timeout(END_SEC):
                for _ in range(2):  # the first may come before the command's first process has its environment
                    await self.kill(channel.user, exec_id, root)
                    await asyncio.wait({channel.ready}, timeout=_KILL_SEC / 4)
                    if channel.run is not run or not channel.is_open:
                        return
        except TimeoutError:
            pass  # the engine does not answer; the next command will tell
        except ContainerDiedError:
            raise
        except ContainerError as error:
            raise ContainerDiedError(f"The container is lost: a command in it could not be ended. {error}") from error
        finally:
            if channel.run is run:
                channel.close()

    async def kill(self, user: User | None, exec_id: str, root: int) -> None:
        """Kills the processes of a command, together with those of all others that wait to be killed now.

        Args:
            user: Who runs the command.
            exec_id: What its processes carry in their environment.
            root: The process above all of them; 0 when that is not known.

        Raises:
            ContainerError: No shell can be had to kill it from.
        """
        waiting, own = self._doomed[user], (exec_id, root)
        waiting.add(own)
        try:
            async with self._lock:
                if own not in waiting:  # somebody who came before has killed it as well
                    return
                doomed = frozenset(waiting)
                exec_ids, pids = {one for one, _ in doomed}, {pid for _, pid in doomed if pid}
                word = await self._run_kill_script(user, exec_ids, pids)
                if word not in ("", "0") and user != self._root:  # sudo has made some of them root's
                    word = await self._run_kill_script(self._root, exec_ids, pids)
                if word:
                    waiting -= doomed
                if word != "0":
                    _logger.warning("Some processes of a command that was to end may still run in the container.")
        finally:
            waiting.discard(own)

    async def _run_kill_script(self, user: User | None, exec_ids: set[str], pids: set[int]) -> str:
        """Its exit code; empty when no shell answered."""
        for take in (self._shells.take, self._shells.open):
            channel = await take(user)
            run = channel.begin(BoundedOutput(0))
            await channel.play(run, lambda key, _: kill_script(exec_ids, pids, key=key), _KILL_SEC)
            if run.word:
                return run.word
            for one in (channel, *self._shells.idle(user)):  # it died idle, or was stopped by a signal: so were they
                one.close()
        return ""
