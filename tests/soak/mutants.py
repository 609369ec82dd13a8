"""Thirty mutants of the product: each changes one behaviour of one function, and tests of its package should catch it.

`python -m tests.soak.mutants CHECKOUT [ID …]` applies each, runs the tests with `-x`, restores the file, and prints
`caught`, `missed` or `not found`. With `--check` it only looks whether each snippet is found exactly once.
Use a checkout that no other process edits.

A function is found by its qualified name below `ares_exp/`, a test file by its name below `tests/unit/`, so moved files
do not matter. If a function or snippet is gone, replace the mutant by an equal change.
"""

# ruff: noqa: E501 - a mutant is one line

import ast
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    id: str
    function: str
    old: str
    new: str
    description: str
    tests: tuple[str, ...]


M = Mutant
MUTANTS = [
    # --- runner: running/, rollout.py, resume/
    M("R01", "Scheduler._start", "len(self._running) < self.concurrency", "len(self._running) <= self.concurrency",
      "one more episode than `concurrency` runs at once", ("test_scheduler.py",)),
    M("R02", "Scheduler._wait", "self._ready.appendleft if retry.is_first else self._ready.append", "self._ready.append",
      "a retry that goes first waits at the end of the queue", ("test_scheduler.py",)),
    M("R03", "Scheduler._settle", "task.cancelled() and planned.slot in self.cancelled", "False",
      "a cancelled episode ends the run", ("test_scheduler.py",)),
    M("R04", "RetryRules.wait_sec", "if tries > next(named", "if tries >= next(named",
      "one retry fewer than configured", ("test_retries.py",)),
    M("R05", "ResumablePolicy._go_live", "if not self._is_live and not self._recorded:", "if not self._is_live:",
      "asks ahead while recorded responses of other conversations are left", ("test_resumable_policy.py",)),
    M("R06", "Limits.reached", "getattr(spent, name) >= bound", "getattr(spent, name) > bound",
      "a budget that is exactly used up does not end the run", ("test_budget.py",)),
    M("R07", "BudgetMeter.add", "max(0.0, total.cost - known.cost)", "total.cost",
      "the cost of an episode is counted while it runs and again with its row", ("test_budget.py",)),
    M("R08", "ResponseDeadline.hold", "self._given_up_at += seconds", "self._given_up_at += 0 * seconds",
      "time in which the run is held counts towards policy_timeout_sec", ("test_rollout.py", "test_experiment.py")),
    M("R09", "run_episode", "            await client.close()\n", "            pass\n",
      "requests that were sent ahead are not cancelled when the episode ends", ("test_rollout.py", "test_experiment.py")),
    M("R10", "ResponseLog._append", "        except StorageError as failure:\n            self._failure = failure\n            raise\n", "        except StorageError:\n            raise\n",
      "lines follow a line that could not be written", ("test_response_log.py",)),
    # --- containers
    M("C01", "CommandRunner._run", "            except asyncio.CancelledError:\n                await finish(self._killer.end(channel, run, exec_id))\n                raise\n", "            except asyncio.CancelledError:\n                raise\n",
      "a cancelled command keeps running in the container", ("test_command_runner.py",)),
    M("C02", "ShellPool._wait_for_one", "if channel.done() and not channel.cancelled() and channel.exception() is None:", "if False:",
      "a channel that was given to a waiter that is cancelled is lost", ("test_command_runner.py",)),
    M("C03", "ShellPool._changed", "len(free) < MAX_IDLE and not self.is_closed", "not self.is_closed",
      "any number of idle shells stays open", ("test_command_runner.py",)),
    M("C04", "MarkParser.feed", "len(data) - len(self._prefix) + 1", "len(data) - len(self._prefix) + 2",
      "a mark that is cut one byte before the end of its prefix is taken for output", ("test_shell_output.py",)),
    M("C05", "Channel._take_in", "elif self.run.pid and not self.run.word:", "elif self.run.pid != 0:",
      "output of a background process after the exit code is added to the result", ("test_command_runner.py",)),
    M("C06", "_make_symlink", "ups < len(name.parts) and in_real_directory", "ups <= len(name.parts) and in_real_directory",
      "a downloaded link may leave the target by one level", ("test_archive.py",)),
    M("C07", "EgressProxy.destinations", "not _is_ours(address) and (known or address.is_global or policy.allows_address(address))", "not _is_ours(address) and (known or not address.is_private or policy.allows_address(address) or address.version == 6)",
      "an allowed name may mean a private IPv6 address", ("test_egress_proxy.py",)),
    M("C08", "is_dead", "not since_boot and bool(_boot()) and _agree(labels, _MACHINE)", "bool(_boot()) and _agree(labels, _MACHINE)",
      "a thing outside this machine counts as dead after a reboot", ("test_ownership.py",)),
    M("C09", "end_descendants", "            _signal(found - stopped, signal.SIGSTOP)\n            if found <= stopped:\n", "            if True:\n",
      "the guardian kills without stopping first: a fork bomb outlives it", ("test_guardian.py",)),
    M("C10", "_RelayedConnection.hear", "            if self._allowed < 0:\n                raise _RelayError(\"it sent more data on a connection than allowed\")\n", "",
      "a relay may send any amount of data that nobody reads", ("test_local_relays.py",)),
    # --- trajectories
    M("T01", "ending", "    if last is None:\n", "    if last is None or failure is not None:\n",
      "an error after the LAST step replaces the reached outcome", ("test_episode_file.py", "test_collecting_environment.py")),
    M("T02", "RequestComparison.compare", "            self._known.add(key)\n", "",
      "one difference is reported at every later step", ("test_request_diff.py",)),
    M("T03", "RequestComparison._is_same_spelt_otherwise", "\"origin\" not in recorded or \"origin\" not in asked", "\"origin\" not in recorded and \"origin\" not in asked",
      "requests that did not come over HTTP are compared in canonical form", ("test_request_diff.py",)),
    M("T04", "_are_ids", "{int}.issuperset(map(type, tokens))", "all(isinstance(one, int) for one in tokens)",
      "True is shared with 1 in lists of token ids", ("test_step_encoding.py",)),
    M("T05", "ConversationWriter._shared_with_previous", "if new is not given and not (self._plain[index] and old == new):", "if new is not given and not old == new:",
      "a message with True is taken for the same one with 1", ("test_step_encoding.py",)),
    M("T06", "whole_episode", "if episode.num_steps != len(episode.steps):", "if False:",
      "a JSON Lines episode that lacks a step in the middle is read as whole", ("test_jsonl_file.py",)),
    M("T07", "_lost", "last.step_type == \"LAST\"", "last.step_type != \"FIRST\"",
      "an episode without its end counts as ended at any step", ("test_episode_file.py", "test_stored_episodes.py")),
    M("T08", "TrajectoryCollectingEnvironment._recorded", "        except EpisodeStateError:\n            raise  # an invalid call, which changed nothing\n", "",
      "a step after LAST is recorded as a failure of the episode", ("test_collecting_environment.py",)),
    M("T09", "RecordedResponses.next_for", "if name not in taken and queue", "if queue",
      "two conversations take the responses of one recorded conversation", ("test_request_diff.py", "test_resumable_policy.py")),
    M("T10", "WriterLock.release", "if not self._holders and self._descriptor is not None:", "if self._descriptor is not None:",
      "the first of several writers that ends releases the lock of all", ("test_jsonl_file.py", "test_collectors.py")),
]  # fmt: skip


def function_in(checkout: Path, mutant: Mutant) -> list[tuple[Path, int, int]]:
    """Returns file and line range of each function of that qualified name that has the snippet once."""
    found = []
    for path in sorted((checkout / "ares_exp").rglob("*.py")):
        text = path.read_text()
        if mutant.function.rpartition(".")[2] not in text:
            continue
        stack: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
        while stack:
            prefix, node = stack.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    name = f"{prefix}{child.name}"
                    stack.append((f"{name}.", child))
                    if name == mutant.function and child.end_lineno is not None:
                        body = "".join(text.splitlines(keepends=True)[child.lineno - 1 : child.end_lineno])
                        if body.count(mutant.old) == 1:
                            found.append((path, child.lineno - 1, child.end_lineno))
    return found


def test_paths(checkout: Path, mutant: Mutant) -> list[str]:
    files = [path for name in mutant.tests for path in sorted((checkout / "tests" / "unit").rglob(name))]
    folders = list(dict.fromkeys(path.parent for path in files if path.parent != checkout / "tests" / "unit"))
    return [str(path.relative_to(checkout)) for path in [*files, *folders]]


def run_tests(checkout: Path, paths: list[str]) -> tuple[str, str]:
    python = os.environ.get("MUTANTS_PYTHON", str(checkout / ".venv/bin/python"))
    options = ["-x", "-q", "-n", "1", "--tb=no", "-p", "no:cacheprovider", "--timeout=90"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, *paths],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    line = [*found, *done.stdout.splitlines()[-1:], ""][0]
    # 2: xdist stops at the first failure
    caught = done.returncode == 1 or (done.returncode == 2 and line.startswith("FAILED"))
    return ("missed" if done.returncode == 0 else "caught" if caught else f"exit {done.returncode}"), line


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the file is restored
    checkout = Path(sys.argv[1]).resolve()
    wanted = [one for one in sys.argv[2:] if not one.startswith("--")]
    counts: Counter[str] = Counter()
    for mutant in MUTANTS:
        if wanted and mutant.id not in wanted:
            continue
        places, paths = function_in(checkout, mutant), test_paths(checkout, mutant)
        if len(places) != 1 or not paths:
            verdict, why = "not found", f"{len(places)} functions with the snippet, tests {paths}"
        elif "--check" in sys.argv:
            verdict, why = "found", f"{places[0][0].relative_to(checkout)}, {' '.join(paths)}"
        else:
            path, start, end = places[0]
            text = path.read_text()
            lines = text.splitlines(keepends=True)
            body = "".join(lines[start:end]).replace(mutant.old, mutant.new)
            try:
                path.write_text("".join(lines[:start]) + body + "".join(lines[end:]))
                verdict, why = run_tests(checkout, paths)
            finally:
                path.write_text(text)
        counts[verdict] += 1
        print(f"{mutant.id} {verdict:9} {mutant.function}: {mutant.description} [{why}]", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))


if __name__ == "__main__":
    main()
