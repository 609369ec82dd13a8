"""Python programs for a container that make every kind of file change, and list the resulting files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from typing import Any

from ares_exp.containers.container import Container

WORK_SEC = 60.0

# Finds directories and files of the base image that can be changed, because the container itself does not use them.
_PICK = """
directories, files = [], []
for name in sorted(os.listdir("/usr/share")):
    path = "/usr/share/" + name
    if os.path.islink(path) or not os.path.isdir(path) or name in ("zoneinfo", "terminfo", "locale"):
        continue
    below = [os.path.join(at, one) for at, _, found in os.walk(path) for one in sorted(found)]
    plain = [one for one in below if os.path.isfile(one) and not os.path.islink(one)]
    if len(below) > 300 or not plain:
        continue
    if len(directories) < 4:
        directories.append(path)
    else:
        files += [one for one in plain if os.lstat(one).st_nlink == 1 and os.path.getsize(one) < 2 ** 20][:2]
print(json.dumps({"directories": directories, "files": files[:8]}))
"""

STEPS = {
    "append": "open(files[0], 'a').write('more')",
    "mode": "os.chmod(files[1], 0o600)",
    "mtime": "os.utime(files[2], ns=(1234567890_123456789, 1234567890_123456789))",
    "owner": "os.chown(files[3], 1000, 1234567)",
    "delete a file": "os.remove(files[4])",
    "file to directory": "os.remove(files[5]); os.mkdir(files[5]); write(files[5] + '/inner')",
    "file to link": "os.remove(files[6]); os.symlink('/etc', files[6])",
    "name of a base file": "os.link(files[7], '/n/name-of-base')",
    "delete a directory": "shutil.rmtree(directories[0])",
    "refill a directory": "shutil.rmtree(directories[1]); os.mkdir(directories[1]); write(directories[1] + '/only')",
    "directory to file": "shutil.rmtree(directories[2]); write(directories[2])",
    "directory to link": "shutil.rmtree(directories[3]); os.symlink('nowhere', directories[3])",
    "mode of a base directory": "os.chmod('/opt', 0o711)",
    "links": "for name, to in {'rel': 'plain', 'abs': '/etc/passwd', 'out': '../../../../etc/shadow', 'dangling':"
    " 'nowhere', 'dir': '/tmp', 'odd': '\\udcff\\n', 'owned': 'x'}.items(): os.symlink(to, '/n/link-' + name)",
    "owner of a link": "os.lchown('/n/link-owned', 5, 6)",
    "names": "write('/n/h1', b'hard' * 99); os.mkdir('/n/d'); os.link('/n/h1', '/n/h2'); os.link('/n/h1', '/n/d/h3')",
    "attributes": "write('/n/xa'); os.setxattr('/n/xa', 'user.note', b'\\0\\1bin\\xff'); os.mkdir('/n/xd');"
    " os.setxattr('/n/xd', 'user.of', b'directory')",
    "capability": "write('/n/cap'); os.setxattr('/n/cap', 'security.capability',"
    " bytes.fromhex('0100000200040000000000000000000000000000'))",
    "setuid": "write('/n/suid'); os.chmod('/n/suid', 0o4755); write('/n/sgid'); os.chmod('/n/sgid', 0o2750)",
    "directories": "os.mkdir('/n/sticky'); os.chmod('/n/sticky', 0o1777); os.mkdir('/n/ro'); write('/n/ro/in');"
    " os.chmod('/n/ro', 0o555); os.makedirs('/n/empty/deep/er')",
    "mtime of a directory": "os.mkdir('/n/old'); write('/n/old/in'); os.utime('/n/old', ns=(10**18 + 7, 10**18 + 7))",
    "future": "write('/n/future'); os.utime('/n/future', (4102444800, 4102444800))",
    "fifo": "os.mkfifo('/n/fifo', 0o640)",
    "socket": "socket.socket(socket.AF_UNIX).bind('/n/sock')",
    "sparse": "f = open('/n/sparse', 'wb'); f.write(b'start'); f.seek(9 << 20); f.write(b'end'); f.close()",
    "zeros": "write('/n/zeros', bytes(300_000)); write('/n/nothing', b'')",
    "large": "write('/n/large', bytes(range(256)) * 4000)",
    "odd names": "for name in ('new\\nline', '-rf', ' sp ace ', 'q\\'uo\"te`$(x)', 'back\\\\slash\\\\n', '*glob?[a]',"
    " 'ünïcödé-文件', 'tab\\t', '#', '~', 'a:b=c', '%41'): write('/n/' + name, name.encode())",
    "names that are no UTF-8": "write(b'/n/bad\\xff\\xfeutf8'); os.mkdir(b'/n/dir\\xff'); write(b'/n/dir\\xff/in')",
    "names of whiteouts": "write('/n/.wh.file', b'literal'); os.mkdir('/n/.wh.dir'); write('/n/.wh.dir/in')",
    "long path": "path = '/n/' + 'd' * 255 + '/' + 'e' * 255 + '/' + 'f' * 255; os.makedirs(path);"
    " write(path + '/' + 'g' * 255)",
    "large ids": "write('/n/ids'); os.chown('/n/ids', 3000000000, 3000000001)",
}

_MAKE = """
files, directories, failed = picked["files"], picked["directories"], []
def write(path, data=b"x"):
    with open(path, "wb") as file:
        file.write(data)
os.mkdir("/n")
write("/n/plain", b"plain")
for name, source in steps.items():
    try:
        exec(source)
    except OSError as error:
        failed.append(name)
print(json.dumps(failed))
"""

# Prints all attributes of the files at or below these paths, and of the directories that contain the paths.
_LIST = """
found, names = {}, {}
def add(path):
    try:
        s = os.lstat(path)
    except FileNotFoundError:
        return
    kind = stat.S_IFMT(s.st_mode)
    if stat.S_ISSOCK(kind):
        return
    seen = [kind, stat.S_IMODE(s.st_mode), s.st_uid, s.st_gid, s.st_mtime_ns]
    if stat.S_ISREG(kind):
        with open(path, "rb") as file:
            seen += [s.st_size, hashlib.sha256(file.read()).hexdigest()]
        if s.st_nlink > 1:
            names.setdefault(s.st_ino, []).append(repr(path))
    elif stat.S_ISLNK(kind):
        seen.append(repr(os.readlink(path)))
    if not stat.S_ISLNK(kind):
        for name in sorted(os.listxattr(path)):
            if name.startswith(("user.", "security.capability")):
                seen.append([name, os.getxattr(path, name).hex()])
    found[repr(path)] = seen
for root in roots:
    parent = os.path.dirname(root)
    if parent != "/":
        add(parent)
    add(root)
    for at, directories, files in () if os.path.islink(root) else os.walk(root):
        for name in directories + files:
            add(os.path.join(at, name))
for group in names.values():
    if len(group) > 1:
        for path in group:
            found[path].append(sorted(group))
print(json.dumps(found))
"""


async def python(box: Container, source: str, **given: object) -> Any:
    """Runs a Python program in the container as root. Returns the JSON that it prints, parsed."""
    imports = "import hashlib, json, os, shutil, socket, stat"
    values = "\n".join(f"{name} = json.loads({json.dumps(value)!r})" for name, value in given.items())
    command = "python3 -c " + shlex.quote("\n".join((imports, values, source)))
    result = await box.exec(command, user="root", cwd="/", timeout_sec=WORK_SEC, max_output_bytes=16 * 2**20)
    assert result.exit_code == 0, result.output[-2000:]
    assert not result.elided_bytes
    return json.loads(result.output)


async def make_awkward(box: Container, *, leave_out: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Makes every kind of change to the files of a container, except the `STEPS` in `leave_out`.

    Returns:
        The paths that contain all changes, as `roots` for `listing`, and the names of the `STEPS` that failed.
    """
    picked = await python(box, _PICK)
    assert (len(picked["directories"]), len(picked["files"])) == (4, 8)
    steps = {name: source for name, source in STEPS.items() if name not in leave_out}
    failed = await python(box, _MAKE, picked=picked, steps=steps)
    return ["/n", "/opt", *picked["directories"], *picked["files"]], failed


async def listing(box: Container, roots: list[str]) -> dict[str, list[Any]]:
    """Lists the attributes and contents of the files at and below the paths in `roots`."""
    found: dict[str, list[Any]] = await python(box, _LIST, roots=roots)
    return found
