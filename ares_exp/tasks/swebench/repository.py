"""Operations on the git repository in a SWE-bench container, which use the `git` of the container.

They set up the repository, read the agent's changes, and apply a patch. All of them are shell scripts that run as root.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

from ares_exp.containers.container import Container, ExecResult
from ares_exp.errors import ContainerStartError

REPOSITORY = "/testbed"
MAX_PATCH_BYTES = 32 * 2**20
_SET_UP_TIMEOUT_SEC = 1200.0
_GIT_TIMEOUT_SEC = 600.0
_LOG_CHARS = 2000

# The owner of the repository in the image may differ from the user who runs git there.
_ENV: Mapping[str, str] = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "LC_ALL": "C",
}

_START = "refs/ares_exp/start"
"""Name of a git ref to the files as they were before the agent started, including untracked files."""

# Defines `ours`: git with a new, separate git directory for the repository's files and objects. The agent may have
# changed or broken the repository's own configuration, hooks, attributes, index or owner. With `ours`, these cannot
# start programs or change file contents. Files that the repository ignores stay ignored.
_OURS = """
clean=$(mktemp -d)  # where a HOME is that has nothing in it either
trap 'rm -rf "$clean"' EXIT
export HOME="$clean" XDG_CONFIG_HOME="$clean" GIT_CONFIG_NOSYSTEM=1
folder=$(git rev-parse --git-common-dir 2>/dev/null) || folder=.git
folder=$(cd "$folder" 2>/dev/null && pwd) || { echo "there is no git repository any more" >&2; exit 5; }
if [ ${#BASE} -eq 40 ]; then export GIT_DEFAULT_HASH=sha1; else export GIT_DEFAULT_HASH=sha256; fi
git init -q --bare --template= "$clean/git"
mkdir "$clean/git/info"
if [ -f "$folder/info/exclude" ]; then cp "$folder/info/exclude" "$clean/git/info"; fi
ours() { GIT_DIR="$clean/git" GIT_WORK_TREE="$PWD" git "$@"; }
add_all() {
  ours add -A 2> "$clean/said" && return
  cat "$clean/said" >&2
  grep -q "does not have a commit checked out" "$clean/said" || return 1
  ours add -A --ignore-errors 2>/dev/null || :  # a repository without a commit inside of this one: left out
}
"""

# Removes refs and objects that are newer than the base commit, because they may contain the fix. Searching for
# unreachable commits takes a second in a repository of 400,000 objects. It is repacked only if such commits are found.
_SET_UP = f"""set -eu
git merge-base --is-ancestor "$BASE" HEAD || {{ echo "HEAD does not come from $BASE"; exit 3; }}
git remote | while read -r remote; do git remote remove "$remote"; done
newest=$(git show -s --format=%ct "$BASE")
git for-each-ref --no-merged HEAD --format='%(refname) %(committerdate:unix)%(*committerdate:unix)' |
  while read -r ref time; do [ "${{time:-0}}" -gt 0 ] && [ "$time" -le "$newest" ] || echo "delete $ref"; done |
  git update-ref --stdin
git reflog expire --expire=now --all
folder=$(git rev-parse --git-dir)
rm -f "$folder/FETCH_HEAD" "$folder/ORIG_HEAD"
has_more() {{
  stored=$(git cat-file --batch-all-objects --unordered --batch-check='%(objecttype)' | grep -c '^commit' || :)
  [ "$stored" -gt "$(git rev-list --count --all HEAD)" ]
}}
if has_more; then
  rm -f "$folder"/objects/pack/*.keep "$folder"/objects/pack/*.promisor
  git repack -adq
  git prune --expire=now
  if has_more; then echo "it keeps commits that nothing leads to"; exit 4; fi
fi
{_OURS}
export GIT_OBJECT_DIRECTORY="$folder/objects"
ours read-tree "$(git rev-parse HEAD)"
add_all
git update-ref {_START} "$(ours write-tree)"
"""

_PATCH = f"""set -eu
{_OURS}
export GIT_ALTERNATE_OBJECT_DIRECTORIES="$folder/objects"
start=$(git rev-parse --quiet --verify {_START} 2>/dev/null) || start=$(cat "$folder/{_START}" 2>/dev/null) || :
case "$start" in "" | *[!0-9a-f]*) start=$BASE ;; esac
ours cat-file -e "$start^{{tree}}" 2>/dev/null || start=$BASE
patch="$clean/patch"
ours read-tree "$start"
add_all
ours diff-index --cached -p --binary --full-index --no-renames --no-ext-diff --no-textconv "$start" > "$patch"
[ "$(wc -c < "$patch")" -le {MAX_PATCH_BYTES} ] || {{ echo "it is larger than {MAX_PATCH_BYTES:,} bytes" >&2; exit 4; }}
base64 < "$patch"
"""

_APPLY = """git apply --verbose --whitespace=nowarn "$PATCH" ||
git apply --verbose --whitespace=nowarn --3way "$PATCH"
"""


@dataclass(frozen=True, slots=True)
class AgentPatch:
    """An agent's changes as a patch (`git diff --binary`). If no patch could be created, `problem` is the reason."""

    data: bytes = b""
    problem: str | None = None


async def set_up_repository(container: Container, base_commit: str) -> None:
    """Prepares the repository for an agent: removes history that may contain the fix, and records the current files.

    Removes remotes, the reflog, unreachable objects, and branches and tags that are newer than the base commit.
    Commits that the creator of the image added on top of the base commit are kept. `agent_patch` later compares the
    agent's files with the recorded files.

    Raises:
        ContainerStartError: The image has no repository, or the repository lacks the commit.
        ContainerError: The container failed.
    """
    result = await _git(container, _SET_UP, timeout_sec=_SET_UP_TIMEOUT_SEC, BASE=base_commit)
    if result.exit_code != 0:
        raise ContainerStartError(
            f"The git repository in {REPOSITORY} cannot be set up at commit {base_commit}: {told(result)} "
            "Check the image of the row. It must contain git."
        )


async def agent_patch(container: Container, base_commit: str) -> AgentPatch:
    """Returns the agent's changes since `set_up_repository`, including new files, but not files that git ignores."""
    result = await _git(
        container, _PATCH, timeout_sec=_GIT_TIMEOUT_SEC, max_output_bytes=2 * MAX_PATCH_BYTES, BASE=base_commit
    )
    if result.exit_code != 0 or result.elided_bytes:
        return AgentPatch(problem=f"The patch cannot be read from the agent's repository: {told(result)}")
    try:
        return AgentPatch(base64.b64decode("".join(result.output.split()), validate=True))
    except (binascii.Error, ValueError):
        return AgentPatch(problem=("The patch cannot be read from the agent's repository: git printed invalid data."))


async def apply_patch(container: Container, path: str) -> ExecResult:
    """Applies the patch file at `path` in the container. Exit code 1 of the result means that it does not apply."""
    return await _git(container, _APPLY, timeout_sec=_GIT_TIMEOUT_SEC, PATCH=path)


async def _git(
    container: Container, script: str, *, timeout_sec: float, max_output_bytes: int = 2**20, **variables: str
) -> ExecResult:
    return await container.exec(
        script,
        cwd=REPOSITORY,
        env={**_ENV, **variables},
        user="root",
        timeout_sec=timeout_sec,
        max_output_bytes=max_output_bytes,
        shell="bash -c",
        separate_stderr=True,
    )


def told(result: ExecResult) -> str:
    """Returns the exit code of a command and the end of its output as one sentence, for messages."""
    ended = "it took too long" if result.timed_out else f"exit code {result.exit_code}"
    said = " ".join(f"{result.stderr or ''} {result.output if result.exit_code else ''}".split())[-_LOG_CHARS:]
    return f"{ended}: {said}." if said else f"{ended}."
