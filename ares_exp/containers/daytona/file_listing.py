"""A listing of a sandbox's files, made and compared inside it, so that only differences leave the sandbox.

A line says of one path all by which a change shows. The first listing stays in a directory of ours, sorted; later ones
are compared with it by `sort -m` and `uniq -u`. With GNU `find`, a line has NUL in place of each line break of its
path. Without it (busybox), `stat` makes the lines, and what has a line break in its name is left out, and counted.

POSIX `sh` with the programs of `_NEEDED` (coreutils and others, or busybox).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from ares_exp.containers.filesystem.delta import UNKEPT_DIRECTORIES

DIRECTORY = "/.ares_exp_files"
"""The directory in the sandbox for listings and archives; never listed itself."""

UNSUITABLE, UNREADABLE, ALTERED = 90, 91, 92
"""Exit codes of the scripts: missing program; a file was not read or written; the first listing was changed."""

PRELUDE = f"""\
umask 077; export LC_ALL=C TZ=UTC0 PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH"
unset TAR_OPTIONS POSIXLY_CORRECT GZIP
d={DIRECTORY}; cd / || exit {UNREADABLE}
if command -v gzip >/dev/null 2>&1; then z='gzip -1'; else z=cat; fi
"""
"""The start of every script: `$d` is our directory, `$z` compresses if possible."""

_NEEDED = ("find", "xargs", "stat", "sort", "uniq", "tr", "sha256sum", "wc", "tar", "rm", "mkdir", "date")
_PRUNED = " -o ".join(f"-path {path}" for path in (DIRECTORY, *UNKEPT_DIRECTORIES))
_STAT_FIND = f"""find "$@" -xdev \\( {_PRUNED} -o -name "*$nl*" \\) -prune -o"""

# Inode and size of directories are meaningless: overlays invent them.
_LIST = f"""\
nl='
'
list() {{  # makes the file $1, of the file systems of the directories $2...
    into=$1; shift
    : >"$d/codes"; : >"$d/errors"
    if [ "$style" = find ]; then
        {{
            find "$@" -xdev \\( {_PRUNED} \\) -prune -o -type d -printf '%y %m %U %G 0 %T@ %C@ 0 0 0 %p\\0' \\
                -o -printf '%y %m %U %G %s %T@ %C@ %D %i %n %p\\0'
            echo $? >>"$d/codes"
        }} | tr '\\0\\n' '\\n\\0'
    else
        {{ {_STAT_FIND} -type d -print0; echo $? >>"$d/codes"; }} |
            xargs -0 stat -c '%f %u %g 0 %Y %y %Z %z 0 0 0 %n'
        {{ {_STAT_FIND} ! -type d -print0; echo $? >>"$d/codes"; }} |
            xargs -0 stat -c '%f %u %g %s %Y %y %Z %z %d %i %h %n'
    fi 2>>"$d/errors" | sort -u -T "$d" >"$d/$into" || exit {UNREADABLE}
    while read -r code; do
        if [ "$code" -gt 1 ]; then echo "find ended with exit code $code"; exit {UNREADABLE}; fi
    done <"$d/codes"
    while read -r line; do
        case $line in *'No such file or directory'*) ;; *) printf '%.400s\\n' "$line"; exit {UNREADABLE};; esac
    done <"$d/errors"
}}
"""

START = (
    PRELUDE
    + _LIST
    + f"""\
for program in {" ".join(_NEEDED)}; do
    command -v "$program" >/dev/null 2>&1 || {{ echo "$program"; exit {UNSUITABLE}; }}
done
rm -rf "$d" && mkdir "$d" || exit {UNREADABLE}
set -- /
while read -r _ point kind _; do  # an overlay over a part of the root is as much the sandbox's own
    case $point in /|*[!A-Za-z0-9/._-]*) continue;; esac
    if [ "$kind" = overlay ]; then set -- "$@" "$point"; fi
done </proc/self/mounts
if [ "$(find / -maxdepth 0 -printf x 2>/dev/null)" = x ]; then style=find; else style=stat; fi
list first "$@"
case $(tar --version 2>&1) in *GNU*) tar=gnu;; *) tar=other;; esac
sum=$(sha256sum <"$d/first") || exit {UNREADABLE}
echo "${{sum%% *}} $style $tar ${{z%% *}} $*"
"""
)
"""The script that makes the first listing, in a new directory, and prints the fields of `Started`."""

_STARTED = re.compile(r"([0-9a-f]{64}) (find|stat) (gnu|other) (gzip|cat) (/(?: /[A-Za-z0-9/._-]+)*)\n")
_COMPARED = re.compile(r"([0-9]{1,15}) ([0-9]{1,15}) ([0-9]{1,15})\n")


@dataclass(frozen=True, slots=True)
class Started:
    """The result of the script `START`.

    Attributes:
        digest: Digest of the first listing.
        style: Which program makes the lines.
        has_gnu_tar: Whether `tar` is GNU's.
        has_gzip: Whether it can compress.
        roots: The directories whose file systems are listed.
    """

    digest: str
    style: str
    has_gnu_tar: bool
    has_gzip: bool
    roots: tuple[str, ...]

    @classmethod
    def parse(cls, output: str) -> Started | None:
        """Parses the output of the script; `None` if it is malformed."""
        found = _STARTED.fullmatch(output)
        if found is None:
            return None
        return cls(found[1], found[2], found[3] == "gnu", found[4] == "gzip", tuple(found[5].split()))


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a `compare_script` besides the changes.

    Attributes:
        clock_sec: The sandbox's clock at its start.
        unlisted: Names with line breaks, which cannot be listed.
        size: Size of the file of changes, bytes.
    """

    clock_sec: int
    unlisted: int
    size: int

    @classmethod
    def parse(cls, output: str) -> Compared | None:
        """Parses the output of the script; `None` if it is malformed."""
        found = _COMPARED.fullmatch(output)
        return None if found is None else cls(*(int(number) for number in found.groups()))


CHANGES = f"{DIRECTORY}/changes"
"""The output file of a `compare_script`; see `listed_changes`."""


def compare_script(started: Started) -> str:
    """Returns a script that makes a new listing and `CHANGES`, and prints the fields of `Compared`."""
    roots = shlex.join(started.roots)
    return (
        PRELUDE
        + _LIST
        + f"""\
now=$(date +%s); style={started.style}
sum=$(sha256sum 2>/dev/null <"$d/first") && [ "${{sum%% *}}" = {started.digest} ] || exit {ALTERED}
rm -f "$d/changes"
list now {roots}
odd=0
if [ "$style" = stat ]; then
    odd=$(
        find {roots} -xdev \\( {_PRUNED} \\) -prune -o -name "*$nl*" -prune -print0 2>/dev/null | tr -cd '\\0' | wc -c
    )
fi
{{
    sort -m -T "$d" "$d/first" "$d/first" "$d/now" | uniq -u; echo .
    sort -m -T "$d" "$d/first" "$d/now" "$d/now" | uniq -u; echo .
    while read -r _ point _; do printf '%s\\n' "$point"; done </proc/self/mounts; echo .
}} | $z >"$d/changes" || exit {UNREADABLE}
echo "$now $((odd)) $(($(wc -c <"$d/changes")))"
"""
    )
