"""One writer per output: a generation number, and a folder of its own that a successor takes away.

::

    OUT/_batchgen/leases/00000007.json    who took generation 7; created once, never changed
    OUT/_batchgen/owners/00000007/        what the owner stages, and its heartbeat; gone when it ended

Taking the lease is creating the next file in ``leases``: of several that try, one succeeds. The new owner
then moves the folders of all earlier owners into its own. Whatever an owner does to the output starts or ends
in its folder, so an owner that was stopped meanwhile and wakes up cannot change anything: its next step fails
because its folder is gone. No clock decides that; clocks only decide when a silent owner may be succeeded.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from dataclasses import dataclass
from typing import Any

from batchgen_data.errors import JobLockedError
from batchgen_data.job.files import LocalFiles

HEARTBEAT_S = 2.0
# An owner that lives on this machine and beats is waited for; one silent for so long is stopped or cut off.
EXPIRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds or held a lease.

    Attributes:
        generation: Number of the lease, from 1.
        machine: Identity of the machine and its process numbers.
        host: The machine's name, for messages.
        pid: The owner's process.
        started: When that process started, in the system's own unit; tells it from a later one of its number.
    """

    generation: int
    machine: str
    host: str
    pid: int
    started: str

    def is_alive(self) -> bool | None:
        """Tell whether the owner's process exists; None where this machine cannot know."""
        if self.machine != _machine():
            return None
        return _process_started(self.pid) == self.started


class Lease:
    """The right to write one output; hold it with `acquire`, give it back with `release`.

    Args:
        state: The folder ``OUT/_batchgen``; it must exist.
        files: The file system.
        shown: The output's name for messages.
        expiry_s: Silence after which an owner that cannot be asked is succeeded.
    """

    def __init__(
        self, state: str, files: LocalFiles, *, shown: str, expiry_s: float = EXPIRY_S, beat: bool = True
    ) -> None:
        self._state = state
        self._files = files
        self._shown = shown
        self._expiry_s = expiry_s
        self._beats = beat
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.generation = 0

    @property
    def folder(self) -> str:
        """The owner's own folder: everything staged lies here."""
        return _owner_folder(self._state, self.generation)

    @property
    def inherited(self) -> list[str]:
        """Folders of earlier owners that did not end in order, oldest first."""
        return [f"{self.folder}/inherited/{name}" for name in self._files.names(f"{self.folder}/inherited")]

    def acquire(self) -> None:
        """Take the lease, or refuse at once.

        Raises:
            JobLockedError: Another run is writing to the output; the message says which.
            OSError: The folder cannot be written.
        """
        leases = f"{self._state}/leases"
        self._files.make_folders(leases)
        self._files.make_folders(f"{self._state}/owners")
        last = last_owner(self._state, self._files)
        probe = f"{leases}/.{os.getpid()}-{os.urandom(4).hex()}"
        self.generation = 1 if last is None else last.generation + 1
        self._files.write(probe, _owner_content(self.generation))
        try:
            if last is not None:
                self._refuse_if_held(last, now_s=self._files.changed_at_s(probe))
            try:
                self._files.publish(probe, f"{leases}/{self.generation:08d}.json")
            except FileExistsError as error:
                raise JobLockedError(
                    f"output {self._shown}: another run took it at the same moment"
                ) from error
        finally:
            self._files.remove(probe)
        self._files.make_folder(self.folder)
        self._files.write(f"{self.folder}/heartbeat", b"")
        # In this order: whoever took a later lease either sees this folder and moves it, or is seen here.
        self.check()
        self._fence_earlier_owners()
        for name in _lease_names(self._state, self._files)[:-2]:
            self._files.remove(f"{leases}/{name}")
        if self._beats:
            self._thread = threading.Thread(target=self._beat, name="batchgen-lease", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Make sure that nobody took over.

        Raises:
            JobLockedError: Somebody did.
        """
        last = last_owner(self._state, self._files)
        if (last is not None and last.generation > self.generation) or not self._files.exists(self.folder):
            raise JobLockedError(
                f"output {self._shown}: another run took over while this one was stopped; this one ends "
                "and has changed nothing since"
            )

    def release(self, *, keep_folder: bool = False) -> None:
        """Give the lease back. Safe to call twice.

        Args:
            keep_folder: Leave the owner's folder to the next owner, who finishes what is begun there.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._files.remove(f"{self.folder}/heartbeat")
        if not keep_folder:
            self._files.remove_folder(self.folder)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                self._files.touch(f"{self.folder}/heartbeat")
            except OSError:
                # Moved away by a successor, or the disk fails: the next step of a commit will say so.
                return

    def _refuse_if_held(self, last: Owner, *, now_s: float) -> None:
        try:
            beat_s = self._files.changed_at_s(f"{_owner_folder(self._state, last.generation)}/heartbeat")
        except FileNotFoundError:
            return  # ended in order, or died before it began
        alive = last.is_alive()
        if alive is False or now_s - beat_s > self._expiry_s:
            return
        where = f"process {last.pid} on {last.host}"
        if alive is None:
            where += (
                f", {max(0.0, now_s - beat_s):.0f} s ago; if it is gone, try again in {self._expiry_s:.0f} s"
            )
        raise JobLockedError(f"output {self._shown} is being written by another run ({where})")

    def _fence_earlier_owners(self) -> None:
        owners, inherited = f"{self._state}/owners", f"{self.folder}/inherited"
        earlier = [name for name in self._files.names(owners) if name < f"{self.generation:08d}"]
        if earlier:
            self._files.make_folder(inherited)
        waiting = [f"{owners}/{name}" for name in earlier]
        while waiting:
            target = f"{inherited}/{os.path.basename(waiting[0])}"
            self._files.rename(waiting.pop(0), target)
            # An owner that died while taking over leaves those before it inside its own folder.
            waiting += [f"{target}/inherited/{name}" for name in self._files.names(f"{target}/inherited")]


def last_owner(state: str, files: LocalFiles) -> Owner | None:
    """Return who took the latest lease of an output, None where nobody ever did.

    Raises:
        JobLockedError: The lease cannot be read.
    """
    names = _lease_names(state, files)
    if not names:
        return None
    generation = int(names[-1].partition(".")[0])
    try:
        fields = json.loads(files.read(f"{state}/leases/{names[-1]}"))
        return Owner(
            generation,
            str(fields["machine"]),
            str(fields["host"]),
            int(fields["pid"]),
            str(fields["started"]),
        )
    except (ValueError, KeyError, FileNotFoundError):
        # Removed by a later owner between the two calls, or cut off by a power loss: its number stands.
        return Owner(generation, "", "an unknown machine", 0, "")


def running_owner(state: str, files: LocalFiles, expiry_s: float = EXPIRY_S) -> Owner | None:
    """Return who holds the lease now, as far as this machine can tell; None if nobody, or silent."""
    last = last_owner(state, files)
    if last is None or last.is_alive() is False:
        return None
    try:
        beat_s = files.changed_at_s(f"{_owner_folder(state, last.generation)}/heartbeat")
    except FileNotFoundError:
        return None
    return last if time.time() - beat_s < expiry_s else None


def _lease_names(state: str, files: LocalFiles) -> list[str]:
    return [name for name in files.names(f"{state}/leases") if not name.startswith(".")]


def _owner_folder(state: str, generation: int) -> str:
    return f"{state}/owners/{generation:08d}"


def _owner_content(generation: int) -> bytes:
    fields: dict[str, Any] = {
        "generation": generation,
        "machine": _machine(),
        "host": platform.node(),
        "pid": os.getpid(),
        "started": _process_started(os.getpid()),
    }
    return json.dumps(fields).encode()


def _machine() -> str:
    """Identify the kernel and the space of process numbers: containers of one machine do not share them."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as source:
            boot = source.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _process_started(pid: int) -> str:
    """Return when a process started, an empty string where there is none (or it only waits to be reaped)."""
    try:
        with open(f"/proc/{pid}/stat") as source:
            fields = source.read().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return ""
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "running"
