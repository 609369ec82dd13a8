"""The client of `tests/warm_start.py`: what it is called with is played there, and it ends as that does.

Its first argument is the server's address, the others are those of `ares_exp`. It imports as little as it can.
"""

import marshal
import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(f"\0{sys.argv[1]}")
    request = marshal.dumps((sys.argv[2:], os.getcwd(), dict(os.environ)))  # noqa: PTH109 - pathlib takes long to import
    socket.send_fds(server, [request], [0, 1, 2])
    reply = server.recv(100)
if not reply:
    sys.exit("the server of tests/warm_start.py has gone")
code = marshal.loads(reply)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
