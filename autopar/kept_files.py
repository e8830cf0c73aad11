"""Keep texts in the files of a directory, by name: as they were written or not at all, and no more bytes than a limit.

    keep_text(directory, "plan-1f.json", text)        read_text(directory, "plan-1f.json")  ->  text, or None

Several processes may read and write at once: a text is written under another name first, so that whoever reads sees
the whole file or none, and of two writers one wins. Before the text stands its digest, so that one that was damaged is
none, also where it could be read as another. When there is too much, what was not read for longest goes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 512 * 2**20
"""Most bytes that a directory may hold."""
SHARE_LEFT = 0.75
"""Share of these bytes that is left when files go."""
WRITES_PER_LOOK = 16
"""Mean number of writes until the directory is measured again; a write's name decides."""


def read_text(directory: Path, name: str) -> str | None:
    """Return the text that was kept under a name; None if there is none, or it cannot be read, or is another."""
    path = directory / name
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    if digest != _digest(text):
        return None
    with suppress(OSError):
        os.utime(path)
    return text


def keep_text(directory: Path, name: str, text: str, *, most_bytes: int = MOST_BYTES) -> None:
    """Keep a text under a name; a directory that cannot be written to is left alone."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=directory, suffix=".tmp", delete=False) as file:
            written = Path(file.name)
            try:
                file.write(f"{_digest(text)}\n{text}")
                file.flush()
                os.replace(written, directory / name)
            except OSError:
                written.unlink(missing_ok=True)
                return
    except OSError:
        return
    # By the name and not by chance: which files are there decides no plan, and tests can ask for it.
    if zlib.crc32(name.encode()) % WRITES_PER_LOOK == 0 or len(text) > most_bytes / WRITES_PER_LOOK:
        limit_bytes(directory, most_bytes)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def limit_bytes(directory: Path, most_bytes: int) -> None:
    """Remove the files that were not read for longest, if the files of a directory have more bytes than a limit."""
    found: list[tuple[float, int, str]] = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):  # another process may remove it meanwhile
                if entry.is_file(follow_symlinks=False):
                    told = entry.stat(follow_symlinks=False)
                    found.append((told.st_mtime, told.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    if total <= most_bytes:
        return
    for _, size, path in sorted(found):
        if total <= SHARE_LEFT * most_bytes:
            return
        with suppress(OSError):
            os.unlink(path)
        total -= size
