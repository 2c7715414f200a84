"""Every change the job makes on disk goes through one small object, which tests wrap to fail or to kill."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from contextlib import suppress
from typing import BinaryIO

# What a file system answers that knows no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_DIGEST_BYTES = 16
_READ_BYTES = 2**20


class LocalFiles:
    """A local (or mounted) file system: the few calls that a commit consists of.

    Nothing here knows what a job is. All methods raise OSError; those that must not replace anything raise
    FileExistsError.
    """

    def make_folder(self, path: str) -> None:
        """Create one folder, which must not exist: of several that try, one succeeds."""
        os.mkdir(path)

    def make_folders(self, path: str) -> None:
        """Create a folder and those above it, where they are missing."""
        os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> BinaryIO:
        """Open a new file for writing; it must not exist."""
        return open(path, "xb")

    def append(self, path: str) -> BinaryIO:
        """Open a new file for unbuffered appending: every write is one call of the system."""
        return open(path, "xb", buffering=0)

    def write(self, path: str, content: bytes) -> None:
        """Create a file with `content`, durably."""
        with self.create(path) as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())

    def sync(self, path: str) -> None:
        """Make a file's content, or a folder's names, durable."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def publish(self, staged: str, final: str) -> None:
        """Make a whole file visible under its final name, durably, never over another file.

        The staged name stays. Where there are no hard links the file is renamed instead, which is as good
        among runs, since only the lease's owner can name the staged file, but could replace a foreign one.
        """
        folder = os.path.dirname(final)
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
            self.sync(os.path.dirname(folder))
        try:
            os.link(staged, final)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(final):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final) from error
            os.rename(staged, final)
        self.sync(folder)

    def rename(self, source: str, target: str) -> None:
        """Move a file or a folder to a name that is free; both folders are made durable."""
        os.rename(source, target)
        self.sync(os.path.dirname(target))
        self.sync(os.path.dirname(source))

    def replace(self, source: str, target: str) -> None:
        """Move a file over another, durably."""
        os.replace(source, target)
        self.sync(os.path.dirname(target))

    def touch(self, path: str) -> None:
        """Set a file's time of change to now."""
        os.utime(path)

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it, if it is there."""
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def remove_empty(self, path: str) -> None:
        """Remove a folder that has nothing in it; OSError if it has."""
        os.rmdir(path)

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; none where it is missing."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def tree(self, path: str) -> list[str]:
        """Return the sorted paths of all files below a folder, relative to it."""
        found = []
        for folder, _, names in os.walk(path):
            found += [os.path.relpath(os.path.join(folder, name), path) for name in names]
        return sorted(found)

    def exists(self, path: str) -> bool:
        """Tell whether there is anything at `path`."""
        return os.path.lexists(path)

    def size_bytes(self, path: str) -> int | None:
        """Return a file's size, None where it is missing."""
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return None

    def changed_at_s(self, path: str) -> float:
        """Return when a file last changed, by the clock of the file system."""
        return os.stat(path).st_mtime

    def read(self, path: str) -> bytes:
        """Return a file's content."""
        with open(path, "rb") as source:
            return source.read()


def file_digest(path: str) -> str:
    """Return the BLAKE2b digest of a file's bytes, as hexadecimal digits.

    Raises:
        OSError: It cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open(path, "rb", buffering=0) as source:
        while chunk := source.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
