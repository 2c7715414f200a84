"""Reading stretches of safetensors files past the page cache, checked for length, and into their places.

Weights that are streamed are read once per pass: caching them would only push out what the process needs,
so files are opened with O_DIRECT where that works, and dropped from the cache after reading where not.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchgen_data.errors import ConfigError, DeviceError
from batchgen_data.models.checkpoint_map import Part, Piece, StoredTensor

logger = logging.getLogger(__name__)

# O_DIRECT wants offsets, lengths and memory in multiples of the device's block; 4096 is one of them all.
_BLOCK_BYTES = 4096
# Larger reads are no faster here (1.4 to 1.7 GB/s from 1 MiB on), smaller ones cost a call each.
_MOST_READ_BYTES = 4 * 2**20
# Smaller ones are copied into place: two blocks of padding would cost more than that.
_LEAST_PLACED_BYTES = 2**18
_RETRY_PAUSES_S = (0.05, 0.5)


@dataclass(frozen=True, slots=True)
class _Copy:
    at: int  # byte within the read
    num_bytes: int
    dtype: torch.dtype
    part: int
    first: int  # element of the part


@dataclass(frozen=True, slots=True)
class Read:
    """One read: `length` bytes of `file` from `offset` on, a whole block.

    Attributes:
        copies: Where its bytes go from the buffer they are read into.
        place: Instead: where they are read to, in the memory of their unit.
        weight_bytes: Bytes that are weights; the rest only completes blocks.
    """

    file: Path
    offset: int
    length: int
    copies: tuple[_Copy, ...] = ()
    place: int | None = None
    weight_bytes: int = 0


def plan_reads(
    parts: Sequence[Part], read_bytes: int, *, only: Sequence[bool] | None = None
) -> tuple[Read, ...]:
    """Cut what fills `parts` into reads of at most `read_bytes` (a multiple of 4096), in file order.

    Args:
        parts: Of one unit.
        read_bytes: Of a read buffer.
        only: Which of the parts; None for all.
    """
    spans = sorted(
        (
            piece.source.file,
            _begin(piece),
            piece.count * piece.source.dtype.itemsize,
            piece.source.dtype,
            number,
            piece.first,
        )
        for number, part in enumerate(parts)
        if only is None or only[number]
        for piece in part.pieces
    )
    reads: list[Read] = []
    copies: list[_Copy] = []
    file, start, end = Path(), 0, 0

    def finish() -> None:
        if copies:
            num_bytes = sum(copy.num_bytes for copy in copies)
            reads.append(Read(file, start, end - start, tuple(copies), weight_bytes=num_bytes))
            copies.clear()

    for span_file, at, num_bytes, dtype, part, first in spans:
        while num_bytes:
            apart = span_file != file or at > -(-end // _BLOCK_BYTES) * _BLOCK_BYTES
            if apart or at >= start + read_bytes:
                finish()
                file, start = span_file, at // _BLOCK_BYTES * _BLOCK_BYTES
            # Ends of reads are whole blocks, and tensors start at multiples of their element size.
            taken = min(num_bytes, start + read_bytes - at)
            copies.append(_Copy(at - start, taken, dtype, part, first))
            end = at + taken
            at, num_bytes, first = end, num_bytes - taken, first + taken // dtype.itemsize
    finish()
    return tuple(reads)


def place_part(part: Part, end: int) -> int | None:
    """Where `part` can be read to without a copy in memory that is taken up to byte `end`; None where not.

    Reads past the page cache fill whole blocks with whole blocks: a part can lie as far from the start of a
    block as it does in its file. Its blocks are its own, so that what completes them overwrites nothing.
    """
    pieces = part.pieces
    if part.num_bytes < _LEAST_PLACED_BYTES or not all(map(_follows, pieces, pieces[1:])):
        return None
    if pieces[0].first or pieces[0].source.dtype != part.dtype:
        return None
    return -(-end // _BLOCK_BYTES) * _BLOCK_BYTES + _begin(pieces[0]) % _BLOCK_BYTES


def _follows(piece: Piece, following: Piece) -> bool:
    """Whether two pieces lie side by side in the same file and in their part."""
    return (
        piece.source.file == following.source.file
        and piece.source.dtype == following.source.dtype
        and _begin(piece) + piece.count * piece.source.dtype.itemsize == _begin(following)
        and piece.first + piece.count == following.first
    )


def _begin(piece: Piece) -> int:
    """The byte of its file at which a piece begins."""
    return piece.source.offset + piece.source_first * piece.source.dtype.itemsize


def placed_bytes(part: Part, place: int) -> int:
    """The end of a placed part's last block."""
    return -(-(place + part.num_bytes) // _BLOCK_BYTES) * _BLOCK_BYTES


def plan_placed(part: Part, place: int, read_bytes: int) -> tuple[Read, ...]:
    """Cut what fills `part`, placed at byte `place` of its unit, into reads of at most `read_bytes`."""
    file, begin = part.pieces[0].source.file, _begin(part.pieces[0])
    end, at = begin + part.num_bytes, begin // _BLOCK_BYTES * _BLOCK_BYTES
    reads = []
    while at < end:
        length = min(read_bytes, end - at)
        reads.append(
            Read(
                file,
                at,
                length,
                place=place + at - begin,
                weight_bytes=at + length - max(at, begin),
            )
        )
        at += length
    return tuple(reads)


def copy_weights(read: Read, buffer: torch.Tensor, destinations: Sequence[torch.Tensor]) -> None:
    """Copy what `read` left in `buffer` [bytes] to the parts it belongs to, converted to their types."""
    for copy in read.copies:
        source = buffer[copy.at : copy.at + copy.num_bytes].view(copy.dtype)
        flat = destinations[copy.part].view(-1)
        flat[copy.first : copy.first + source.numel()].copy_(source, non_blocking=True)


class WeightFiles:
    """The open weight files of a checkpoint; methods may be called from several threads.

    Args:
        files: Safetensors files.
        keep_cached: Read through the page cache and leave everything there: for a machine whose memory
            holds the checkpoint beside a smaller device.

    Raises:
        ConfigError: A file cannot be opened.
    """

    def __init__(self, files: Iterable[Path], *, keep_cached: bool = False) -> None:
        self._keep_cached = keep_cached
        self._open: dict[Path, tuple[int, bool]] = {}
        self._states: dict[Path, tuple[int, int]] = {}
        self._descriptors: list[int] = []
        try:
            for file in files:
                self._states[file] = _state(self._opened(file, direct=not keep_cached)[0])
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot open the weights file {file}: {error.strerror or error}") from error

    def read(self, read: Read, buffer: torch.Tensor) -> None:
        """Fill the front of `buffer` with the bytes of `read`, up to the end of a block; tried three times.

        Args:
            read: What.
            buffer: Starts at a block, like `read_buffer`'s.

        Raises:
            DeviceError: The bytes cannot be read; file, offset and cause are named.
        """
        for pause_s in (*_RETRY_PAUSES_S, None):
            try:
                return self._read_once(read, buffer)
            except _ChangedError as error:
                raise DeviceError(f"the weights file {read.file} {error}; restart with whole files") from None
            except OSError as error:
                if pause_s is None:
                    raise DeviceError(
                        f"reading the weights file {read.file} failed {len(_RETRY_PAUSES_S) + 1} times at "
                        f"byte {read.offset}: {error.strerror or error}"
                    ) from error
                logger.warning("reading %s at byte %d: %s; trying again", read.file, read.offset, error)
                time.sleep(pause_s)

    def fill(self, parts: Sequence[Part], destinations: Sequence[torch.Tensor]) -> None:
        """Read `parts` into tensors of their shapes and types, one read after another.

        Raises:
            DeviceError: See `read`.
        """
        reads = plan_reads(parts, _MOST_READ_BYTES)
        buffer = read_buffer(read_buffer_bytes(reads))
        for read in reads:
            self.read(read, buffer)
            copy_weights(read, buffer, destinations)

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Read a whole stored tensor into memory of its own.

        Raises:
            DeviceError: See `read`.
        """
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        piece = Piece(stored, 0, 0, stored.count)
        self.fill([Part(stored.name, stored.shape, stored.dtype, (piece,))], [whole])
        return whole

    def close(self) -> None:
        """Close the files; safe to call twice."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _opened(self, file: Path, *, direct: bool) -> tuple[int, bool]:
        descriptor, direct = _open(file, direct=direct)
        # One that is replaced stays open: another thread may be reading from it.
        self._descriptors.append(descriptor)
        self._open[file] = descriptor, direct
        return descriptor, direct

    def _read_once(self, read: Read, buffer: torch.Tensor) -> None:
        descriptor, direct = self._open[read.file]
        if _state(descriptor) != self._states[read.file]:
            raise _ChangedError("was changed while it was in use")
        memory = buffer.numpy()
        done = 0
        while done < read.length:
            # Whole blocks; at the end of the file less comes back.
            end = -(-read.length // _BLOCK_BYTES) * _BLOCK_BYTES
            try:
                got = _pread(descriptor, memory[done:end], read.offset + done)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                # Some file systems accept the flag and refuse the read.
                logger.info("%s cannot be read past the page cache", read.file)
                descriptor, direct = self._opened(read.file, direct=False)
                continue
            if got <= 0:
                raise OSError(errno.EIO, f"the file ends at byte {read.offset + done}")
            done += got if done + got >= read.length else got // _BLOCK_BYTES * _BLOCK_BYTES
        if not direct and not self._keep_cached:
            os.posix_fadvise(descriptor, read.offset, read.length, os.POSIX_FADV_DONTNEED)


def read_size(units: Iterable[Sequence[Part]]) -> int:
    """Bytes of the buffers in which to read `units`: as much as the longest tensor, within bounds."""
    return read_bytes(max((_stored_bytes(part) for parts in units for part in parts), default=0))


def read_bytes(longest: int) -> int:
    """Bytes of a buffer to read tensors of at most `longest` bytes in."""
    return min(_MOST_READ_BYTES, _BLOCK_BYTES * (2 + longest // _BLOCK_BYTES))


def _stored_bytes(part: Part) -> int:
    return max(piece.count * piece.source.dtype.itemsize for piece in part.pieces)


def read_buffer_bytes(reads: Iterable[Read]) -> int:
    """Bytes of the smallest buffer that takes each of `reads`."""
    longest = max((read.length for read in reads), default=1)
    return -(-longest // _BLOCK_BYTES) * _BLOCK_BYTES


def read_buffer(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Memory [num_bytes] that starts at a block, as O_DIRECT wants it."""
    memory = torch.empty(num_bytes + _BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
    start = -memory.data_ptr() % _BLOCK_BYTES
    return memory[start : start + num_bytes]


class _ChangedError(Exception):
    pass


def _open(file: Path, *, direct: bool) -> tuple[int, bool]:
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(file, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(file, os.O_RDONLY), False


def _state(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _pread(descriptor: int, memory: Any, offset: int) -> int:
    return os.preadv(descriptor, [memory], offset)
