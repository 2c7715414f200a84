"""Profiles on disk, one file for each model, device, type, number of threads and set of versions.

They lie under `$XDG_CACHE_HOME/batchgen/profiles` (default `~/.cache`). A profile that cannot be read is
measured again; one that cannot be written is used all the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from batchgen_data.errors import ConfigError
from batchgen_data.planner.cost import Profile

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "batchgen-data")


def profile_path(folder: Path, device: str, dtype: str, num_threads: int) -> Path:
    """Where the profile of a model belongs.

    Args:
        folder: the model's; the content of its config.json counts, not that of its weights.
        device: the device's own name, not only its kind.
        dtype: the running type.
        num_threads: CPU threads.
    """
    config = (folder / "config.json").read_bytes()
    key = [
        str(folder.resolve()),
        hashlib.sha256(config).hexdigest(),
        device,
        dtype,
        num_threads,
        platform.node(),
        *(version(package) for package in _PACKAGES),
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "batchgen" / "profiles" / f"{digest}.json"


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Let one process at a time make the profile at `path`: two at once would disturb each other."""
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(f"{path}.lock"))
        except OSError as error:
            logger.warning("profiles cannot be locked in %s: %s", path.parent, error)
        yield


def load_profile(path: Path) -> Profile | None:
    """Read a profile; None where there is none that can be used."""
    try:
        return Profile.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        logger.warning("the profile %s cannot be used (%s)", path, error)
        return None


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile, whole or not at all; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(profile.to_dict(), file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("the profile cannot be kept in %s: %s", path.parent, error)
