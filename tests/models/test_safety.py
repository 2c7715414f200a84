"""A hostile or damaged model folder: nothing in it runs, nothing outside is read, the file is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen_data.errors import ConfigError, UnsafeModelError
from batchgen_data.models.load import load_model, resolve_source
from tiny_models import tiny_checkpoint

CPU = torch.device("cpu")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("sound"), "llama")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def load(folder: Path) -> Any:
    return load_model(resolve_source(folder), device=CPU)


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps(content))


def shard(folder: Path, name: Any, *, rename: bool = True) -> None:
    """Turn the folder's one weights file into a "sharded" one called `name`."""
    if rename:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    else:
        (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickle_weights_are_refused_and_never_opened(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(UnsafeModelError, match=f"{name}.*convert them to safetensors"):
        load(folder)
    assert not marker.exists()


def test_pickle_weights_beside_safetensors_are_ignored(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    load(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../pytorch_model.bin", 7, None])
def test_an_index_that_names_no_safetensors_is_refused(folder: Path, tmp_path: Path, name: Any) -> None:
    marker = tmp_path / "ran"
    shard(folder, name)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(UnsafeModelError, match=r"index\.json"):
        load(folder)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["parent", "absolute", "nested", "link", "link_of_one_file"])
def test_weights_outside_the_folder_are_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside.safetensors"
    shutil.copy(folder / "model.safetensors", outside)
    (folder / "sub").mkdir()
    if kind == "link_of_one_file":
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(outside)
    else:
        names = {
            "parent": "../outside.safetensors",
            "absolute": str(outside),
            "nested": "sub/../../outside.safetensors",
            "link": "linked.safetensors",
        }
        (folder / "linked.safetensors").symlink_to(outside)
        shard(folder, names[kind])
    with pytest.raises(UnsafeModelError, match="outside the model folder"):
        load(folder)


def test_links_of_the_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--org--tiny"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for file in folder.iterdir():
        file.rename(repo / "blobs" / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"blob-{file.name}")
    assert load(snapshot).context_tokens == 1024


def test_a_linked_model_folder_loads(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    assert load(link).context_tokens == 1024


def test_weights_redirected_by_the_config_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", transformers_weights="pytorch_model.bin")
    with pytest.raises(UnsafeModelError, match="transformers_weights"):
        load(folder)


def test_an_adapter_is_refused(folder: Path) -> None:
    edit_json(folder / "adapter_config.json", base_model_name_or_path="org/base")
    with pytest.raises(ConfigError, match=r"adapter_config\.json.*merge"):
        load(folder)


def _plant_code(folder: Path, marker: Path) -> None:
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")


@pytest.mark.parametrize(
    "file, content, key",
    [
        ("config.json", {"auto_map": {"AutoConfig": "code.Config"}}, "auto_map"),
        ("config.json", {"text_config": {"auto_map": {"AutoModel": "code.Model"}}}, "text_config.auto_map"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Model", None]}}, "auto_map"),
        (
            "processor_config.json",
            {"parts": [{"auto_map": {"AutoProcessor": "code.Model"}}]},
            "parts[0].auto_map",
        ),
        ("generation_config.json", {"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
    ],
)
def test_code_of_the_model_is_refused_and_never_run(
    folder: Path, tmp_path: Path, file: str, content: dict[str, Any], key: str
) -> None:
    marker = tmp_path / "ran"
    _plant_code(folder, marker)
    edit_json(folder / "config.json", model_type="homemade")
    edit_json(folder / file, **content)
    with pytest.raises(UnsafeModelError) as raised:
        load(folder)
    assert str(folder / file) in str(raised.value)
    assert repr(key) in str(raised.value)
    assert not marker.exists()


def test_code_that_a_native_architecture_no_longer_needs_is_never_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    _plant_code(folder, marker)
    edit_json(
        folder / "config.json",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Model", "code.Model"]})
    loaded = load(folder)
    assert type(loaded.model).__module__.startswith("transformers.models.llama")
    assert type(loaded.tokenizer).__module__.startswith("transformers.")
    assert not marker.exists()


def _cuts(size: int) -> list[int]:
    return [0, 4, 8, 100, size // 2, size - 1]


@pytest.mark.parametrize("cut_idx", range(6))
def test_truncated_weights_are_an_error_that_names_the_file(folder: Path, cut_idx: int) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, _cuts(file.stat().st_size)[cut_idx])
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated or corrupt"):
        load(folder)


def test_a_corrupt_header_is_an_error_that_names_the_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    with file.open("r+b") as raw:
        raw.seek(8)
        raw.write(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated or corrupt"):
        load(folder)


def test_a_git_lfs_pointer_is_called_one(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match="Git LFS pointer"):
        load(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder, "model-2.safetensors", rename=False)
    with pytest.raises(ConfigError, match=r"model-2\.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    shard(folder, "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        load(folder)
    (folder / "tiny.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"to load tiny\.Q4_1\.gguf give the path"):
        load(folder)
