"""What must hold of a model folder before any of it is loaded.

Nothing here runs code from the folder or reads a pickle; only JSON and safetensors headers are parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from batchgen_data.errors import ConfigError, UnsafeModelError

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_CONVERT_HINT = (
    "pickle weights can run code and are never loaded; convert them to safetensors "
    "(model.save_pretrained(folder) in a process that trusts them) or use a revision that has safetensors"
)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: The file is unreadable, is not JSON, or holds something other than an object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def check_no_remote_code(folder: Path, known_model_types: frozenset[str] | set[str]) -> None:
    """Refuse a folder whose configs ask for code of its own that would really be needed.

    Published checkpoints of families that transformers has long supported (Phi-3, DeepSeek-V3, ...) still
    carry the `auto_map` of their early days. For those the key is harmless: `trust_remote_code=False` is
    always passed, so the native class is used and the file that `auto_map` names is never opened. Without
    a native class the model could only run through that code.

    Raises:
        UnsafeModelError: `auto_map` anywhere in a config, and `model_type` is not native to transformers.
        ConfigError: A config file is not valid JSON.
    """
    config_path = folder / "config.json"
    config = read_json(config_path) if config_path.exists() else {}
    if config.get("model_type") in known_model_types:
        return
    for path in sorted(folder.glob("*config*.json")):
        for key in _auto_map_keys(read_json(path)):
            raise UnsafeModelError(
                f"{path} asks to run Python code that comes with the model (key {key!r}), which is never "
                f"done, and transformers has no class of its own for model_type "
                f"{config.get('model_type')!r}; use a model whose architecture transformers supports"
            )


def _auto_map_keys(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            place = f"{at}.{key}" if at else str(key)
            if key == "auto_map" and inner:
                yield place
            else:
                yield from _auto_map_keys(inner, place)
    elif isinstance(value, list):
        for idx, inner in enumerate(value):
            yield from _auto_map_keys(inner, f"{at}[{idx}]")


def check_weight_files(folder: Path) -> list[Path]:
    """Find the folder's safetensors files and check that they are whole and lie inside it.

    Returns:
        The files that will be loaded, in name order.

    Raises:
        UnsafeModelError: Only pickle weights, or an index, link or config that points elsewhere.
        ConfigError: No weights, a listed file is missing, or a file is truncated or corrupt.
    """
    config = read_json(folder / "config.json")
    if config.get("transformers_weights"):
        raise UnsafeModelError(
            f"{folder / 'config.json'}: key 'transformers_weights' redirects the weights to another file; "
            f"remove it and name the weights {WEIGHTS_NAME}"
        )
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{folder} holds an adapter (adapter_config.json), not a whole model; merge it into its base "
            "model first (peft: model.merge_and_unload().save_pretrained(folder))"
        )
    if (folder / WEIGHTS_NAME).exists() or (folder / WEIGHTS_NAME).is_symlink():
        names = {WEIGHTS_NAME}
    elif (folder / INDEX_NAME).exists():
        names = _indexed_names(folder / INDEX_NAME)
    else:
        raise _no_weights(folder)
    files = [_inside(folder, name) for name in sorted(names)]
    for file in files:
        _check_header(file)
    return files


def _indexed_names(index: Path) -> set[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no 'weight_map'; download the model again")
    names: set[str] = set()
    for tensor, name in weight_map.items():
        # transformers picks the reader by suffix: anything else in the index would be unpickled.
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise UnsafeModelError(
                f"{index} maps {tensor!r} to {name!r}, which is no .safetensors file; {_CONVERT_HINT}"
            )
        names.add(name)
    return names


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a weights file after making sure that it cannot be one from elsewhere."""
    path = folder / name
    root = folder.resolve()
    # The hub's cache keeps blobs beside snapshots/<commit>/ and links to them.
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    resolved = path.resolve()
    escapes = Path(name).is_absolute() or "\\" in name or ".." in Path(name).parts
    if escapes or not any(resolved.is_relative_to(allowed) for allowed in roots):
        raise UnsafeModelError(
            f"the weights file {name!r} of {folder} lies outside the model folder (at {resolved}); "
            "copy it into the folder and name it there"
        )
    if not resolved.is_file():
        raise ConfigError(f"the weights file {path} is missing; download the model again")
    return path


def _check_header(file: Path) -> None:
    try:
        with safe_open(file, framework="numpy") as tensors:
            tensors.keys()
    except (SafetensorError, OSError, ValueError) as error:
        with file.open("rb") as raw:
            pointer = raw.read(64).startswith(b"version https://git-lfs")
        what = "is a Git LFS pointer, not the weights themselves" if pointer else "is truncated or corrupt"
        raise ConfigError(f"the weights file {file} {what} ({error}); download it again") from error


def _no_weights(folder: Path) -> ConfigError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if pickles:
        return UnsafeModelError(
            f"{folder} has only pickle weights ({', '.join(pickles[:4])}); {_CONVERT_HINT}"
        )
    if ggufs:
        return ConfigError(f"{folder} has no {WEIGHTS_NAME}; to load {ggufs[0]} give the path of that file")
    return ConfigError(f"{folder} has no weights: neither {WEIGHTS_NAME} nor {INDEX_NAME}")
