"""Where files are: paths and URLs as fsspec file systems."""

from __future__ import annotations

import re
from typing import Any

import fsspec
import fsspec.implementations.local
import pyarrow as pa

from batchgen_data.errors import ConfigError


def without_credentials(url: str) -> str:
    """Return `url` without what may be secret: user name and password, and the query that signs a URL.

    Where it is not plain where a password ends, too much is left out rather than too little.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    # After a colon a password may follow, which may hold slashes and further @ signs.
    rest = re.sub(r"^(?:[^/@]*:.*@|[^/]*@)", "", rest, flags=re.DOTALL)
    is_http = scheme.lower() in ("http", "https")
    path, _, query = rest.partition("?")
    if is_http or "=" in query:  # elsewhere ? is also a glob mark, and # part of a name
        rest = path
    return f"{scheme}://{rest.partition('#')[0] if is_http else rest}"


def storage_failures(url: str) -> tuple[type[Exception], ...]:
    """Return the exceptions by which the file system of `url` says that it failed.

    Remote ones raise what their client libraries raise, which have nothing in common.
    """
    is_remote = fsspec.utils.get_protocol(url) not in ("file", "local")
    return (Exception,) if is_remote else (OSError, pa.ArrowException, ValueError)


def cause(error: BaseException) -> str:
    """Return why a file system failed, in one line and without the credentials of URLs in it."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    line = re.sub(r"\S+://\S+", lambda url: without_credentials(url[0]), str(text).strip().splitlines()[0])
    return (
        line
        if isinstance(error, OSError | pa.ArrowException | ValueError)
        else f"{type(error).__name__}: {line}"
    )


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL and the path in it.

    Raises:
        ConfigError: Unknown protocol, missing package, a chain of URLs, or nobody answers.
    """
    shown = without_credentials(url)
    if "::" in url:
        raise ConfigError(f"{shown}: chained URLs (::) are not supported")
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ConfigError(f"{shown}: {error} (pip install the package)") from error
    except Exception as error:  # some file systems connect when they are made
        raise ConfigError(f"{shown}: {cause(error)}") from error
    return filesystem, path


def is_local(filesystem: Any) -> bool:
    """Tell whether an fsspec file system is this machine's own."""
    return isinstance(filesystem, fsspec.implementations.local.LocalFileSystem)


def open_file(source: str, path: str) -> Any:
    """Open a file for reading bytes.

    Args:
        source: A path or URL that names the file system; it may hold a user, a host or a branch that the
            paths in it do not.
        path: The file's path in that file system.

    Raises:
        ConfigError: See `open_filesystem`.
        Exception: It cannot be opened; one of `storage_failures`.
    """
    filesystem, _ = open_filesystem(source)
    return pa.OSFile(path) if is_local(filesystem) else filesystem.open(path, "rb")
