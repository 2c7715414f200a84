"""Where files are: paths and URLs as fsspec file systems."""

from __future__ import annotations

import re
from typing import Any

import fsspec
import fsspec.implementations.local
import pyarrow as pa

from batchgen_data.errors import ConfigError


def without_credentials(url: str) -> str:
    """Return `url` with any user name and password between ``//`` and ``@`` left out."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL and the path in it.

    Raises:
        ConfigError: Unknown protocol, missing package, or a chain of URLs.
    """
    shown = without_credentials(url)
    if "::" in url:
        raise ConfigError(f"{shown}: chained URLs (::) are not supported")
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ConfigError(f"{shown}: {error} (pip install the package)") from error
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from error
    return filesystem, path


def is_local(filesystem: Any) -> bool:
    """Tell whether an fsspec file system is this machine's own."""
    return isinstance(filesystem, fsspec.implementations.local.LocalFileSystem)


def open_file(url: str) -> Any:
    """Open a path or URL for reading bytes.

    Raises:
        ConfigError: see `open_filesystem`.
        OSError: It cannot be opened.
    """
    filesystem, path = open_filesystem(url)
    return pa.OSFile(path) if is_local(filesystem) else filesystem.open(path, "rb")
