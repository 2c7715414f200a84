"""GGUF files, converted once to a safetensors folder that loads in a second.

transformers dequantises a GGUF file to fp32 in tens of seconds, at every start and in every worker. The
converted folder is kept under `$XDG_CACHE_HOME/batchgen/gguf/<digest>` (default `~/.cache`), where the
digest covers the file's content and the version of transformers that read it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path

from batchgen_data.errors import ConfigError

logger = logging.getLogger(__name__)

_NEEDED_PACKAGES = ("gguf", "accelerate")
# Part of the digest: raise it when what is written into the folder changes.
_LAYOUT = "1"


def converted_folder(file: Path) -> Path:
    """Return the cached safetensors folder of a GGUF file, converting it on first use.

    Safe to call from several processes at once and to kill at any time: one process converts, the others
    wait, and the folder appears by a rename when it is whole.

    Raises:
        ConfigError: A package is missing, the file is damaged or of an unsupported architecture, or the
            cache folder cannot be written.
    """

    from filelock import FileLock

    digest = _digest(file, version("transformers"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen" / "gguf"
    folder = cache / digest
    if folder.is_dir():
        return folder
    for package in _NEEDED_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"reading {file} needs the package {package!r}: "
                "pip install 'batchgen-data[gguf]' (or pip install gguf accelerate)"
            )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{digest}.lock"):
            if folder.is_dir():
                return folder
            # Whoever left these was killed: the lock is ours.
            for stale in cache.glob(f".{digest}.*"):
                shutil.rmtree(stale, ignore_errors=True)
            staged = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=cache))
            try:
                logger.info("converting %s to safetensors once, into %s", file, folder)
                _convert(file, staged)
                _publish(staged, folder)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted copy of {file} under {cache}: {error.strerror or error}; "
            "free some space or point XDG_CACHE_HOME to a writable folder"
        ) from error
    return folder


def _digest(file: Path, reader_version: str) -> str:
    with file.open("rb") as raw:
        content = hashlib.file_digest(raw, "blake2b").hexdigest()
    key = f"{_LAYOUT}:{content}:{file.stat().st_size}:{reader_version}"
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _publish(staged: Path, folder: Path) -> None:
    # Made private by their makers; the cache may be shared.
    staged.chmod(0o755)
    for path in staged.iterdir():
        path.chmod(0o644)
    try:
        os.rename(staged, folder)
    except OSError:
        # On a file system without working locks another process may have been first; its copy is as good.
        if not folder.is_dir():
            raise


def _convert(file: Path, staged: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .load import check_loading, quiet_transformers

    # transformers also reads the configs that happen to lie beside the file; a folder of its own has none.
    # Its reader draws a bar of its own on stderr.
    with quiet_transformers(), redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory() as alone:
        os.symlink(file.resolve(), Path(alone) / "model.gguf")
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                alone, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
            )
            model, loading = AutoModelForCausalLM.from_pretrained(
                alone,
                gguf_file="model.gguf",
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:
            raise ConfigError(
                f"cannot read the GGUF file {file}: {type(error).__name__}: {error}; it may be damaged, or "
                "of an architecture that transformers cannot read from GGUF; use a safetensors folder"
            ) from error
        check_loading(loading, str(file))
        # Marked as quantised though its weights are plain fp32 by now; marked models refuse to be saved.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
