"""Digests of a checkpoint's files: what is read is what was written, or the damaged file is named.

    write under another name  ->  seal: digest every file  ->  rename

The rename comes last, so that a checkpoint of this name has all its files and their digests, wherever the writer was
killed. Files hold the shards; a digest is SHA-256 of a file's bytes as they are read back after writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autopar.errors import InvalidArgument

_PREFIX = "autopar-digests-"
DIGESTS = f"{_PREFIX}1.json"  # the number is that of the format


def commit(written: Path, target: Path) -> None:
    """Digest the files of a complete checkpoint and give it its name. Raises `OSError`, also if the name is taken."""
    files = [path for path in sorted(written.rglob("*")) if path.is_file()]
    digests = dict(_digests(written, [str(path.relative_to(written)) for path in files]))
    with open(written / DIGESTS, "w", encoding="utf-8") as file:
        json.dump(digests, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(written)
    if target.exists():
        raise FileExistsError(f"another process has saved {target.name} in the meantime")
    written.rename(target)  # refused, too, if there is a directory that is not empty
    _sync(target.parent)


def damage(path: Path) -> str | None:
    """Return what is wrong with the files of a checkpoint; None if they are as written, or have no digests.

    Without are those that plain JAX or an earlier release wrote. Raises `InvalidArgument` for another format.
    """
    formats = [file.name for file in path.glob(f"{_PREFIX}*")]
    if not formats:
        return None
    if formats != [DIGESTS]:
        raise InvalidArgument(
            f"The checkpoint {path} has digests of the format {formats[0]}, this release reads {DIGESTS}. Read it with "
            "the release that wrote it, or with verify=False."
        )
    try:
        digests: dict[str, str] = json.loads((path / DIGESTS).read_text(encoding="utf-8"))
        names = sorted(digests)
    except (OSError, ValueError, TypeError) as error:
        return f"{DIGESTS} cannot be read ({type(error).__name__}: {error})"
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        return f"its file {missing[0]} is missing"
    try:
        different = [name for name, digest in _digests(path, names) if digest != digests[name]]
    except OSError as error:
        return f"a file cannot be read ({error})"
    return f"the bytes of {different[0]} are not those that were written" if different else None


def discard(written: Path) -> None:
    """Remove what was written of a checkpoint that cannot be completed, to make room."""
    for path in written.parent.glob(f"{written.name}*"):
        shutil.rmtree(path, ignore_errors=True)


def _digests(path: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each file's name and digest; several at a time, for hashing leaves Python's lock alone."""

    def digest(name: str) -> tuple[str, str]:
        with open(path / name, "rb") as file:
            return name, hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        yield from pool.map(digest, names)


def _sync(directory: Path) -> None:
    """Make the names in a directory last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
