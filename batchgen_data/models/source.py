"""Where a model comes from: a folder, the Hugging Face hub, or a GGUF file.

Resolving reads no weights and imports neither torch nor transformers, so that a misspelt model is reported
before anything slow starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchgen_data.errors import ConfigError, UnsafeModelError, nearest

from .safety import PICKLE_SUFFIXES

HUB_TIMEOUT_S = 10.0

_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_WEIGHT_PATTERNS = ["*.safetensors"]
# Nested folders hold copies in other formats (original/, onnx/); so do consolidated files.
_IGNORED_PATTERNS = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that was found.

    Attributes:
        kind: Where it lies.
        name: As the caller spelt it.
        path: The absolute folder or GGUF file; None on the hub.
        revision: The hub commit, so that every worker loads the same one; None elsewhere.
        cached_only: The hub could not be reached and the local copy is used.
    """

    kind: Literal["folder", "hub", "gguf"]
    name: str
    path: Path | None = None
    revision: str | None = None
    cached_only: bool = False


def resolve_source(
    model: str | os.PathLike[str],
    revision: str | None = None,
    *,
    needs: Literal["model", "tokenizer"] = "model",
) -> ModelSource:
    """Find a model without reading its weights; the hub is asked only when no such path exists.

    Args:
        model: A model folder, a `.gguf` file, or a hub id (`org/name` or a bare name); `id@revision` names
            a revision of a tokenizer, which has no option of its own.
        revision: A branch, tag or commit; for hub ids only.
        needs: "tokenizer" accepts a place that has a tokenizer but no weights.

    Raises:
        ConfigError: Nothing is there, within seconds even without a network, or it is no model.
        UnsafeModelError: It has only pickle weights.
    """
    name = os.fspath(model)
    if not name or not name.strip():
        raise ConfigError("the model name is empty; give a model folder, a .gguf file or a hub id (org/name)")
    path = Path(name).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):  # for example a name too long, or with a null byte
        is_folder = is_file = False
    if is_folder or is_file:
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r} is for hub ids, but {name!r} is a local path; leave it out"
            )
        path = path.absolute()
        if is_folder:
            _check_folder(path, needs)
            return ModelSource(kind="folder", name=name, path=path)
        _check_gguf(path)
        return ModelSource(kind="gguf", name=name, path=path)
    if needs == "tokenizer" and revision is None and "@" in name[:-1]:
        name, _, revision = name.rpartition("@")
    if not _may_be_hub_id(name):
        place = str(path.absolute())[:300]
        raise ConfigError(f"unknown model {name[:200]!r}: there is no folder or file {place}{_sibling(path)}")
    return _resolve_hub(name, revision, needs)


def pinned(source: ModelSource) -> str:
    """Return a tokenizer's source as one name that means the same in every process."""
    if source.path is not None:
        return str(source.path)
    return f"{source.name}@{source.revision}" if source.revision else source.name


def local_folder(source: ModelSource, *, weights: bool = True) -> Path:
    """Return a folder with the model's files, downloading or converting it where needed.

    Args:
        source: A resolved source.
        weights: False leaves the weights of a hub model out (for its tokenizer and config alone).

    Raises:
        ConfigError: The download or the conversion failed.
    """
    if source.kind == "folder":
        assert source.path is not None
        return source.path
    if source.kind == "gguf":
        from .gguf import converted_folder

        assert source.path is not None
        return converted_folder(source.path)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source.name,
                revision=source.revision,
                allow_patterns=_TOKENIZER_PATTERNS + (_WEIGHT_PATTERNS if weights else []),
                ignore_patterns=_IGNORED_PATTERNS,
                local_files_only=source.cached_only,
                etag_timeout=HUB_TIMEOUT_S,
            )
        )
    except Exception as error:
        raise ConfigError(
            f"cannot download {source.name!r} (revision {source.revision}) from the Hugging Face hub: "
            f"{_cause(error)}; try again, or download it elsewhere and give the folder"
        ) from error


def _check_folder(folder: Path, needs: str) -> None:
    if needs == "tokenizer" or (folder / "config.json").is_file():
        return
    ggufs = sorted(folder.glob("*.gguf"))
    hint = f"; to load {ggufs[0].name} give the path of that file" if ggufs else ""
    raise ConfigError(f"{folder} is not a model folder: it has no config.json{hint}")


def _check_gguf(file: Path) -> None:
    if file.suffix in PICKLE_SUFFIXES:
        raise UnsafeModelError(
            f"{file} looks like pickle weights, which can run code and are never loaded; "
            "give a folder with config.json and safetensors weights"
        )
    try:
        with file.open("rb") as raw:
            magic = raw.read(4)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ConfigError(
            f"{file} is not a GGUF file; give a model folder, a .gguf file or a hub id (org/name)"
        )


def _may_be_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.endswith(".gguf")


def _resolve_hub(name: str, revision: str | None, needs: str) -> ModelSource:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        # Asks once: the download calls would retry for half a minute before saying that nobody answers.
        info = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise ConfigError(
            f"access to the hub model {name!r} is restricted; accept its terms on its page and log in "
            "(hf auth login)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"the hub model {name!r} has no revision {revision!r}") from error
    except Exception as error:
        known = isinstance(error, RepositoryNotFoundError)
        cached = (
            None
            if known
            else try_to_load_from_cache(
                name, "config.json" if needs == "model" else "tokenizer.json", revision=revision
            )
        )
        if isinstance(cached, str):
            return ModelSource(kind="hub", name=name, revision=Path(cached).parent.name, cached_only=True)
        if known:
            cause = "the hub has no such repository (or it is private: log in with hf auth login)"
        elif constants.HF_HUB_OFFLINE:
            cause = "the hub is switched off here (HF_HUB_OFFLINE) and the local cache has no copy"
        else:
            cause = f"the hub could not be asked ({_cause(error)}) and the local cache has no copy"
        path = Path(name)
        raise ConfigError(
            f"unknown model {name!r}: there is no folder {path.absolute()}, and {cause}; "
            f"check the spelling, or give the path of a model folder{_sibling(path)}"
        ) from error
    files = {sibling.rfilename for sibling in info.siblings or ()}
    if needs == "model" and files and not any(file.endswith(".safetensors") for file in files):
        if any(Path(file).suffix in PICKLE_SUFFIXES for file in files):
            raise UnsafeModelError(
                f"the hub model {name!r} has only pickle weights, which can run code and are never loaded; "
                "use a revision or a copy that has safetensors"
            )
        raise ConfigError(
            f"the hub repository {name!r} has no safetensors weights; for a .gguf file in it, download the "
            "file and give its path"
        )
    return ModelSource(kind="hub", name=name, revision=info.sha)


def _cause(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line[:200]}" if first_line else type(error).__name__


def _sibling(path: Path) -> str:
    """Hint at a local name near the one that was not found."""
    parent = path.parent if path.parent.is_dir() else path.parent.parent
    wanted = path.name if path.parent.is_dir() else path.parent.name
    try:
        hint = nearest(wanted, os.listdir(parent)) if parent.is_dir() else ""
    except OSError:
        return ""
    return f"{hint} (in {parent.absolute()})" if hint else ""
