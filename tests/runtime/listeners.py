"""The addresses at which this process listens, as `ss -ltnp` shows them."""

import os
import socket
from contextlib import suppress


def listeners() -> list[str]:
    """The addresses at which this process listens: Linux lists its sockets by their inodes."""
    own: set[str] = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found: list[str] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/self/net/{table}") as lines:
            rows = [line.split() for line in lines][1:]
        for row in rows:
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                words = bytes.fromhex(row[1].partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(socket.inet_ntop(family, packed).removeprefix("::ffff:"))
    return found
