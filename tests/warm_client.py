"""The client of `tests/warm_start.py`: what it is called with is run there, and it ends as that does.

Its first arguments are the server's address and a module, the others are those of the module. It imports as
little as it can.
"""

import marshal
import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(f"\0{sys.argv[1]}")
    here = os.getcwd()  # noqa: PTH109 - pathlib takes long to import
    request = marshal.dumps((sys.argv[2], sys.argv[3:], here, dict(os.environ), False))
    socket.send_fds(server, [request], [0, 1, 2])
    reply = server.recv(100) and server.recv(100)
if not reply:
    sys.exit("the server of tests/warm_start.py has gone")
code = marshal.loads(reply)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
