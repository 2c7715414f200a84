"""Replacing a complete output by another complete one, in steps that a successor can finish.

What a reader sees of ``data`` and ``errors`` on the way is a part of the old results, nothing, or a part of
the new ones; never some of each. Every step moves one folder out of or into the folder of the lease's owner,
so that only the owner can do it.
"""

from __future__ import annotations

from batchgen_data.job.files import LocalFiles
from batchgen_data.job.lease import Lease
from batchgen_data.job.store import Places

_TAKEN, _REPLACED = "complete", "replaced"


def replace_output(output: str, lease: Lease, files: LocalFiles) -> None:
    """Put the finished replacement in the place of the results that `output` shows.

    Raises:
        OSError: The storage refused; the next owner goes on.
    """
    # From here on the old results will go, whoever does it.
    files.rename(f"{output}/_batchgen/next", f"{lease.folder}/{_TAKEN}")
    _move_in(output, lease.folder, lease, files)


def finish_replacement(output: str, lease: Lease, files: LocalFiles) -> bool:
    """Finish what an earlier owner began with `replace_output`.

    Returns:
        Whether an earlier owner died between its beginning and its end: the output is that of its job now.

    Raises:
        OSError: The storage refused.
    """
    was_begun = False
    for folder in lease.inherited:
        was_begun |= files.exists(f"{folder}/{_REPLACED}")
        if files.exists(f"{folder}/{_TAKEN}"):
            was_begun = True
            _move_in(output, folder, lease, files)
    return was_begun


def replacement_is_begun(owner: str, files: LocalFiles) -> bool:
    """Tell whether a replacement was begun in an owner's folder and is not finished."""
    return files.exists(f"{owner}/{_TAKEN}")


def _move_in(output: str, owner: str, lease: Lease, files: LocalFiles) -> None:
    new, places = f"{owner}/{_TAKEN}", Places.of_output(output)
    shown = {"errors": f"{output}/errors", "data": f"{output}/data", "job": places.job}
    # As long as the new job is not in its place, whatever is there is old.
    if files.exists(f"{new}/job"):
        retired = f"{owner}/{_REPLACED}"
        files.make_folders(retired)
        for name, path in shown.items():
            if files.exists(path):
                files.rename(path, f"{retired}/{name}")
    for name in ("job", "data", "errors"):
        if files.exists(f"{new}/{name}"):
            files.rename(f"{new}/{name}", shown[name])
    files.remove_folder(new)
