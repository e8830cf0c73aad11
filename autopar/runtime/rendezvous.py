"""Give short texts to other processes by name: who asks before the text is there waits for it.

NCCL needs it: of two processes that open a communicator, one draws the number that both must know. Any process may
ask; a text is no secret, and a question is nothing but the name.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener

from autopar.errors import HostLost

WAIT_S = 60.0


class Rendezvous:
    """The texts of this process; `host` is where others reach it."""

    def __init__(self, host: str = "127.0.0.1", *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._listener = Listener((host, 0), backlog=128)
        self._texts: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._accepting = _in_background(self._accept)

    def address(self) -> str:
        """Host and port."""
        host, port = self._listener.address
        return f"{host}:{port}"

    def publish(self, name: str, text: bytes) -> None:
        """Answer with the text whoever asks for the name, before or after."""
        with self._changed:
            self._texts[name] = text
            self._changed.notify_all()

    def close(self) -> None:
        """Answer no more."""
        self._closed = True
        # The accepting thread does not notice that its socket is closed, but that somebody comes.
        Client(self._listener.address).close()
        self._accepting.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                connection = self._listener.accept()
                if self._closed:
                    connection.close()
                    return
                _in_background(lambda asked=connection: self._answer(asked))

    def _answer(self, connection: Connection) -> None:
        with suppress(OSError, EOFError), connection:  # of who has gone, or came for something else
            name = connection.recv_bytes().decode()
            with self._changed:
                self._changed.wait_for(lambda: name in self._texts, timeout=self._wait_s)
                connection.send_bytes(self._texts.get(name, b""))


def fetch(address: str, name: str) -> bytes:
    """The text that the process at the address publishes under the name; waits for it."""
    host, _, port = address.rpartition(":")
    try:
        with Client((host, int(port))) as connection:
            connection.send_bytes(name.encode())
            text = connection.recv_bytes()
    except (OSError, EOFError) as error:
        raise HostLost(
            f"The process at {address} was asked for '{name}' and did not answer: {error!r}. "
            "See whether it is still there, and whether its host can be reached from here."
        ) from error
    if not text:
        raise HostLost(
            f"The process at {address} has not made '{name}' in time. "
            "All processes must load the same programs; look for an error in that one."
        )
    return text


def _in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
