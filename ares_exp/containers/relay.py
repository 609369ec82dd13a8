"""The relay in Python 3.6 or newer, for forwarded ports. Its source is sent to a container. No module imports it.

The relay listens on a port in the container, and exchanges the data of its connections with the run's process over
stdin and stdout. `relay.pl` and `relay.mjs` are the same program for perl and node. The arguments are the lease in
seconds and the ports to try. The first line of output is `port PORT`, `taken` or `failed REASON`. Frames follow, in
both directions. A frame is the number of a connection and a word (32 bits each, big-endian), then the data.

| word | meaning | sent by |
|---|---|---|
| 1 to 32768 | this number of bytes of data follows | both |
| 0 | end of this direction; for connection 0: end of the relay | both |
| 0x80000000 + n | the receiver has taken n bytes of the connection, so n more may be sent | both |
| 0xfffffffe | the connection is broken | both |
| 0xffffffff | a connection was accepted | the relay |

For each connection, a side sends at most 256 KiB that the other side has not confirmed, so that an unread connection
does not block the others. A relay ends when its stdin is closed, or when no frame arrives during its lease.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import sys

WINDOW = 262144
CHUNK = 32768
CONNECTIONS = 64
MORE, BROKEN, ACCEPTED = 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF
LEASE = int(sys.argv[1]) if len(sys.argv) > 1 else 0  # seconds of silence after which the relay ends; 0: no limit


class Connection:
    """One accepted connection: how much may still be sent, the data still to be written, and its open directions."""

    def __init__(self, number: int, accepted: socket.socket) -> None:
        self.number = number
        self.socket = accepted
        self.credit = WINDOW
        self.waiting = bytearray()
        self.taken = 0
        self.reads = self.writes = True
        self.ending = False

    def fileno(self) -> int:
        return self.socket.fileno()


class Relay:
    """The listener, its accepted connections, and the loop that moves their data to stdout and from stdin."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.connections = {}  # type: dict[int, Connection]
        self.count = 0
        self.heard = bytearray()

    def run(self) -> None:
        while True:
            everyone = list(self.connections.values())
            readers = [one for one in everyone if one.reads and one.credit]  # type: list[Connection | int | socket.socket]
            readers += [0, self.listener] if len(everyone) < CONNECTIONS else [0]
            readable, writable, _ = select.select(readers, [one for one in everyone if one.waiting], [])
            for one in readable:
                if one == 0:
                    self.hear()
                elif one is self.listener:
                    self.accept()
                elif isinstance(one, Connection) and one.number in self.connections:
                    self.read(one)
            for one in writable:
                if one.number in self.connections:
                    self.write(one)

    def put(self, number: int, word: int, data: bytes = b"") -> None:
        left = memoryview(struct.pack(">II", number, word) + data)
        while left:
            left = left[os.write(1, left) :]

    def accept(self) -> None:
        try:
            accepted = self.listener.accept()[0]
        except OSError:
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.count += 1
        self.connections[self.count] = Connection(self.count, accepted)
        self.put(self.count, ACCEPTED)

    def hear(self) -> None:
        data = os.read(0, 65536)
        if not data:
            sys.exit()
        signal.alarm(LEASE)
        self.heard += data
        while len(self.heard) >= 8:
            number, word = struct.unpack_from(">II", self.heard)
            end = 8 + (word if word <= CHUNK else 0)
            if len(self.heard) < end:
                break
            payload = bytes(self.heard[8:end])
            del self.heard[:end]
            if number == 0:
                sys.exit()
            if number in self.connections:
                self.follow(self.connections[number], word, payload)

    def follow(self, one: Connection, word: int, data: bytes) -> None:
        if word == BROKEN:
            self.drop(one)
        elif word & MORE:
            one.credit += word & ~MORE
        else:
            one.waiting += data
            one.ending = one.ending or word == 0
            self.write(one)

    def read(self, one: Connection) -> None:
        try:
            data = one.socket.recv(min(CHUNK, one.credit))
        except BlockingIOError:
            return
        except OSError:
            self.put(one.number, BROKEN)
            self.drop(one)
            return
        one.credit -= len(data)
        self.put(one.number, len(data), data)
        if not data:
            one.reads = False
            self.finish(one)

    def write(self, one: Connection) -> None:
        try:
            while one.waiting:
                sent = one.socket.send(one.waiting)
                del one.waiting[:sent]
                one.taken += sent
        except BlockingIOError:
            pass
        except OSError:
            self.put(one.number, BROKEN)
            self.drop(one)
            return
        if one.taken >= WINDOW // 4:
            self.put(one.number, MORE + one.taken)
            one.taken = 0
        if one.ending and one.writes and not one.waiting:
            one.writes = False
            with contextlib.suppress(OSError):
                one.socket.shutdown(socket.SHUT_WR)
            self.finish(one)

    def finish(self, one: Connection) -> None:
        """Closes a connection if both of its directions have ended."""
        if not one.reads and not one.writes:
            one.socket.close()
            del self.connections[one.number]

    def drop(self, one: Connection) -> None:
        """Closes a connection immediately. The program at its other end sees a reset."""
        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.socket.close()
        del self.connections[one.number]


def lapse(*_: object) -> None:
    """Ends the relay because no frame arrived during its lease. Sends an end frame first, unless stdout is full."""
    os.set_blocking(1, False)
    with contextlib.suppress(OSError):
        os.write(1, struct.pack(">II", 0, 0))
    os._exit(0)


def main() -> None:
    """Listens on the first free port of the arguments, and relays its connections."""
    said = b"taken\n"
    for port in sys.argv[2:]:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", int(port)))
            listener.listen(CONNECTIONS)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                said = f"failed {error.strerror}\n".encode()
            continue
        listener.setblocking(False)
        os.write(1, f"port {port}\n".encode())
        signal.signal(signal.SIGALRM, lapse)
        signal.alarm(LEASE)
        Relay(listener).run()
    os.write(1, said)


if __name__ == "__main__":
    main()
