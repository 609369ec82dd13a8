"""The programs that listen inside containers for `relay_door`, which sends their source to one of three interpreters.

Each takes the ports to try as its arguments, prints `door PORT`, `taken` or `failed REASON` as its first line, and then
speaks frames on stdin and stdout: a connection's number and a word, 32 bits each, big-endian, and the data.

| word | meaning | sent by |
|---|---|---|
| 1 to 32768 | so many bytes of data follow | both |
| 0 | the end of this direction; of connection 0: the end of the relay | both |
| 0x80000000 + n | n more bytes may be sent: as many have been taken from the connection here | both |
| 0xfffffffe | the connection is broken | both |
| 0xffffffff | a connection was accepted | the relay |

Each side sends at most 256 KiB of one connection ahead of what it was allowed, so that one that nobody reads stops no
other. A relay ends when its stdin does.
"""
