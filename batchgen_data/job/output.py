"""The output of a run: found, locked, recovered, and matched with the job that is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from batchgen_data.errors import ConfigError, JobLockedError
from batchgen_data.job.check import CheckedJob
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.filesystem import is_local, open_filesystem, without_credentials
from batchgen_data.job.journal import journal_files, read_journal
from batchgen_data.job.lease import EXPIRY_S, Lease, running_owner
from batchgen_data.job.ledger import Ledger
from batchgen_data.job.manifest import Manifest, describe_job, read_manifest
from batchgen_data.job.parts import STORAGE_FAILURES
from batchgen_data.job.records import ShardState
from batchgen_data.job.replace import finish_replacement, replace_output, replacement_is_begun
from batchgen_data.job.shards import Shard
from batchgen_data.job.signals import signals_ignored
from batchgen_data.job.store import JobStore, Places


def check_output(url: str, files: LocalFiles | None = None) -> str:
    """Return the local path of an output folder that a run may use; nothing is changed.

    Raises:
        ConfigError: It is no folder on a file system of this machine, or holds other things.
        JobLockedError: Another run is writing to it.
    """
    files = files or LocalFiles()
    shown = without_credentials(url)
    path = output_path(url)
    try:
        if os.path.isfile(path):
            raise ConfigError(f"output {shown} is a file; name a folder")
        if files.names(path) and not files.exists(f"{path}/_batchgen"):
            raise ConfigError(
                f"output {shown} is not empty and was not written by batchgen run; name another folder"
            )
        owner = running_owner(f"{path}/_batchgen", files)
    except OSError as error:
        raise ConfigError(f"output {shown} cannot be used: {error.strerror}") from error
    if owner is not None and owner.is_alive():
        raise JobLockedError(
            f"output {shown} is being written by another run (process {owner.pid} on {owner.host})"
        )
    return path


def output_path(url: str) -> str:
    """Return the local path of an output folder.

    Raises:
        ConfigError: It is not on a file system of this machine.
    """
    filesystem, path = open_filesystem(url)
    if not is_local(filesystem):
        raise ConfigError(
            f"output {without_credentials(url)}: results go to a local or mounted folder, which can be "
            "locked and renamed in; copy OUT/data and OUT/errors from there"
        )
    return path.rstrip("/") or "/"


@dataclass(slots=True)
class OpenOutput:
    """An output under this process's lease.

    Attributes:
        path: The output folder.
        lease: Held.
        store: Of the job at work: the one shown, or its replacement.
        manifest: Of that job.
        shards: Of that job.
        states: What is recorded, kept up to date by the ledger.
        ledger: Takes outcomes.
        files: The file system.
        num_recovered: Commits of earlier runs that were finished.
        is_replacement: Whether the job replaces another when it is complete.
    """

    path: str
    lease: Lease
    store: JobStore
    manifest: Manifest
    shards: list[Shard]
    states: dict[int, ShardState]
    ledger: Ledger
    files: LocalFiles
    num_recovered: int
    is_replacement: bool

    @property
    def is_complete(self) -> bool:
        """Whether every shard is recorded and nothing is open."""
        return not self.ledger.num_missing and len(self.states) == len(self.shards)

    @property
    def announcement(self) -> str:
        """One line that says what the run is about to do."""
        num_rows, missing = self.manifest.num_rows, self.ledger.num_missing
        num_files = len(self.manifest.inputs)
        what = f"{num_rows} rows in {num_files} file{'s' if num_files > 1 else ''}"
        if not missing:
            return f"all {what} are done; nothing to do"
        if missing < num_rows:
            what += f", {num_rows - missing} of them done before"
        return f"{what}; starting the workers"

    def put_in_place(self) -> None:
        """Let a complete replacement take the place of the results shown.

        Raises:
            CommitError: The storage refused; the next run goes on.
        """
        if not self.is_replacement:
            return
        with self.store.commit_errors("the new output"):
            self.lease.check()
            replace_output(self.path, self.lease, self.files)
        self.is_replacement = False
        self.store = JobStore(Places.of_output(self.path), self.lease, self.files, shown=self.store.shown)


@contextmanager
def open_output(
    path: str,
    job: CheckedJob,
    *,
    overwrite: bool = False,
    retry_failed: bool = False,
    files: LocalFiles | None = None,
    expiry_s: float = EXPIRY_S,
) -> Iterator[OpenOutput]:
    """Take the lease of an output, finish what earlier runs left, and open the job for what is missing.

    If the block ends and no row has an outcome, nothing is left of the job, and of the folder if it was new.

    Args:
        path: The output folder, as `check_output` returned it.
        job: The checked job.
        overwrite: Begin a job that will replace the one the output shows, or go on with it.
        retry_failed: Try failed rows again.
        files: The file system.
        expiry_s: See `Lease`.

    Raises:
        ConfigError: The folder cannot be created.
        JobLockedError: Another run holds the lease.
        ResumeMismatchError: The output belongs to another job and `overwrite` is not set.
        CommitError: The storage refused.
    """
    files = files or LocalFiles()
    shown = without_credentials(job.config.output or path)
    state = f"{path}/_batchgen"
    was_there = files.exists(path)
    lease = Lease(state, files, shown=shown, expiry_s=expiry_s)
    try:
        files.make_folders(state)
        lease.acquire()
    except OSError as error:
        raise ConfigError(f"output {shown} cannot be written: {error.strerror}") from error
    try:
        yield _open(path, job, lease, files, shown, overwrite=overwrite, retry_failed=retry_failed)
    except BaseException as error:
        try:
            _close(path, lease, files, shown, was_there=was_there)
        except Exception as second:
            # What stopped the run is what to tell, and an interrupt must stay one.
            error.add_note(f"Afterwards: {second}")
        raise
    _close(path, lease, files, shown, was_there=was_there)


def _close(path: str, lease: Lease, files: LocalFiles, shown: str, *, was_there: bool) -> None:
    current = Places.of_output(path)
    with signals_ignored(), JobStore(current, lease, files, shown=shown).commit_errors("the lease"):
        if is_begun(lease.folder, files):
            lease.release(keep_folder=True)
            return
        for places in (Places.of_replacement(path), current):
            if not has_outcomes(places, files):
                _discard(places, lease, files)
        lease.release()
        if not files.exists(current.manifest):
            _remove_traces(path, lease.generation, files, keep_folder=was_there)


def _open(
    path: str,
    job: CheckedJob,
    lease: Lease,
    files: LocalFiles,
    shown: str,
    *,
    overwrite: bool,
    retry_failed: bool,
) -> OpenOutput:
    current, replacement = Places.of_output(path), Places.of_replacement(path)
    stores = {places: JobStore(places, lease, files, shown=shown) for places in (current, replacement)}
    with stores[current].commit_errors("recovery"):
        was_replaced = finish_replacement(path, lease, files)
        num_recovered = sum(store.recover() for store in stores.values())
        for folder in lease.inherited:
            files.remove_folder(folder)
        for places in stores:
            if not has_outcomes(places, files):
                _discard(places, lease, files)
    before = read_manifest(current, files)
    wanted = describe_job(job, generation=lease.generation, before=before)
    places = replacement if overwrite and before is not None else current
    if was_replaced and before is not None and before.is_same(wanted):
        places = current  # a run with this very option was killed as it ended
    manifest = read_manifest(places, files)
    if manifest is not None and places is replacement and not manifest.is_same(wanted):
        _discard(replacement, lease, files)  # another replacement, that was never finished
        manifest = None
    elif manifest is not None:
        manifest.check_same(wanted, shown)
    store = stores[places]
    store.prepare()
    if manifest is None:
        manifest = wanted
        store.write_once(places.manifest, manifest.encode())
    shards, states = manifest.shards(), store.load()
    store.sweep(shards, states)
    stats = [file["stat"] for file in wanted.inputs]
    ledger = Ledger(job, shards, store, states, stats, retry_failed=retry_failed)
    ledger.read_journal(files, manifest.first_generation)
    return OpenOutput(
        path,
        lease,
        store,
        manifest,
        shards,
        states,
        ledger,
        files,
        num_recovered,
        is_replacement=places is replacement,
    )


def is_begun(owner: str, files: LocalFiles) -> bool:
    """Tell whether an owner's folder holds a commit or a replacement that the next owner has to finish."""
    staged = [name for kind in ("job", "next") for name in files.names(f"{owner}/{kind}")]
    return any(name.endswith(".json") for name in staged) or replacement_is_begun(owner, files)


def has_outcomes(places: Places, files: LocalFiles) -> bool:
    """Tell whether any row of a job has an outcome, recorded or in the journal."""
    if files.names(places.records):
        return True
    return any(
        entry.results is not None
        for name in journal_files(places.journal, files)
        for entry in read_journal(files.read(f"{places.journal}/{name}"))
    )


def _discard(places: Places, lease: Lease, files: LocalFiles) -> None:
    """Take a job away: out of sight in one step, then off the disk."""
    rubbish = f"{lease.folder}/discarded-{os.urandom(4).hex()}"
    source = places.job if places.kind == "job" else places.root
    if files.exists(source):
        files.rename(source, rubbish)
        files.remove_folder(rubbish)


def _remove_traces(path: str, generation: int, files: LocalFiles, *, keep_folder: bool) -> None:
    """Remove what a run made that came to nothing, as far as no other run uses it."""
    files.remove(f"{path}/_batchgen/leases/{generation:08d}.json")
    folders = ["_batchgen/leases", "_batchgen/owners", "_batchgen", "data", "errors"]
    for folder in folders:
        with suppress(*STORAGE_FAILURES):
            files.remove_empty(f"{path}/{folder}")
    if not keep_folder:
        with suppress(*STORAGE_FAILURES):
            files.remove_empty(path)
