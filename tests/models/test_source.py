"""Finding a model: folders, GGUF files and hub ids, and a plain answer when there is none."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from batchgen_data.errors import ConfigError, UnsafeModelError
from batchgen_data.models.source import ModelSource, local_folder, pinned, resolve_source
from tiny_models import tiny_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may reach the hub, or find what another left in the cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(HfApi, "model_info", _refuse(ConnectionError("no route")))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def _refuse(error: Exception) -> Any:
    def model_info(*args: Any, **options: Any) -> Any:
        raise error

    return model_info


def _answer(*files: str) -> Any:
    def model_info(*args: Any, **options: Any) -> Any:
        return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=file) for file in files])

    return model_info


def _hub_error(kind: type[Exception]) -> Exception:
    return kind.__new__(kind, "no")  # its __init__ wants a response of the hub's own HTTP library


def _cached_model(cache: Path) -> Path:
    """Lay a tiny model out as the hub's cache does."""
    repo = cache / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for file in tiny_checkpoint(cache.parent / "tiny", "llama").iterdir():
        file.rename(repo / "blobs" / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"blob-{file.name}")
    return snapshot


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_folder_is_found_and_its_path_made_absolute(tmp_path: Path) -> None:
    _folder(tmp_path / "here" / "tiny")
    for name in ("tiny", "./tiny/", str(tmp_path / "here" / "tiny")):
        source = resolve_source(name)
        assert (source.kind, source.path, source.revision) == ("folder", tmp_path / "here" / "tiny", None)
    assert local_folder(source) == tmp_path / "here" / "tiny"
    assert pickle.loads(pickle.dumps(source)) == source


def test_a_folder_wins_over_a_hub_id(tmp_path: Path) -> None:
    _folder(tmp_path / "here" / "org" / "tiny")
    assert resolve_source("org/tiny").kind == "folder"


def test_a_gguf_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF rest")
    source = resolve_source(tmp_path / "tiny.gguf")
    assert (source.kind, source.path) == ("gguf", tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    "name, kind, message",
    [
        ("model.gguf", ConfigError, "is not a GGUF file"),
        ("notes.txt", ConfigError, "is not a GGUF file"),
        ("model.bin", UnsafeModelError, "pickle"),
        ("model.pth", UnsafeModelError, "pickle"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, name: str, kind: type[Exception], message: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(kind, match=message):
        resolve_source(tmp_path / name)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_source(tmp_path / "empty")
    (tmp_path / "empty" / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"to load tiny\.gguf give the path"):
        resolve_source(tmp_path / "empty")


def test_a_revision_of_a_local_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision='main' is for hub ids"):
        resolve_source(_folder(tmp_path / "tiny"), "main")


@pytest.mark.parametrize(
    "name",
    [
        "./tiny",
        "/no/such/tiny",
        "../tiny",
        "a/b/c",
        "tiny.gguf",
        "org/tiny.gguf",
        "org\\tiny",
        "~nobody/x",
        "a--b/c",
        "two words",
        "x" * 5000,
        "nul\0l",
        "org/",
        "-x/y",
    ],
)
def test_a_path_that_is_not_there_never_asks_the_hub(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(HfApi, "model_info", _refuse(AssertionError("asked the hub")))
    with pytest.raises(ConfigError, match="unknown model"):
        resolve_source(name)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="the model name is empty"):
        resolve_source(name)


def test_a_misspelt_path_is_told_its_neighbour(tmp_path: Path) -> None:
    _folder(tmp_path / "models" / "smollm2")
    _folder(tmp_path / "here" / "smollm2")
    for name in (
        str(tmp_path / "models" / "smolm2"),
        str(tmp_path / "models" / "smolm2" / "x"),
        "./smolm2",
        "smolm2",
    ):
        with pytest.raises(ConfigError, match="did you mean 'smollm2'"):
            resolve_source(name)


def test_without_a_network_the_answer_comes_soon_and_says_what_was_tried(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        resolve_source("org/tiny")
    message = str(raised.value)
    assert time.monotonic() - started < 5
    assert "unknown model 'org/tiny'" in message
    assert str(tmp_path / "here" / "org" / "tiny") in message
    assert "ConnectionError: no route" in message


def test_offline_mode_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        resolve_source("org/no-such-model")


@pytest.mark.parametrize(
    "error, message",
    [
        (RepositoryNotFoundError, "the hub has no such repository"),
        (RevisionNotFoundError, "has no revision 'v9'"),
        (GatedRepoError, "accept its terms"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(HfApi, "model_info", _refuse(_hub_error(error)))
    with pytest.raises(ConfigError, match=message):
        resolve_source("org/tiny", "v9")


def test_the_commit_is_pinned_when_the_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", _answer("config.json", "model.safetensors", "pytorch_model.bin"))
    source = resolve_source("org/tiny", "main")
    assert source == ModelSource(kind="hub", name="org/tiny", revision=COMMIT)


def test_a_tokenizer_is_pinned_to_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its only option is its name, so the name carries the revision to every worker."""
    asked: list[Any] = []

    def model_info(self: Any, name: str, *, revision: str | None, **_: Any) -> Any:
        asked.append((name, revision))
        return SimpleNamespace(sha=COMMIT, siblings=[])

    monkeypatch.setattr(HfApi, "model_info", model_info)
    name = pinned(resolve_source("org/other", needs="tokenizer"))
    assert name == f"org/other@{COMMIT}"
    assert pinned(resolve_source(name, needs="tokenizer")) == name
    assert resolve_source("org/other@v2", needs="tokenizer").name == "org/other"
    assert asked == [("org/other", None), ("org/other", COMMIT), ("org/other", "v2")]
    _folder(tmp_path / "here" / "local@home")
    assert pinned(resolve_source("local@home", needs="tokenizer")) == str(tmp_path / "here" / "local@home")
    for refused, needs in (("org/other@", "tokenizer"), ("org/other@v2", "model")):
        with pytest.raises(ConfigError, match="unknown model"):
            resolve_source(refused, needs=needs)


def test_a_hub_model_with_only_pickle_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", _answer("config.json", "pytorch_model.bin", "tokenizer.json"))
    with pytest.raises(UnsafeModelError, match="only pickle weights"):
        resolve_source("org/tiny")
    assert resolve_source("org/tiny", needs="tokenizer").kind == "hub"


def test_a_hub_repository_of_gguf_files_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", _answer("tiny.gguf"))
    with pytest.raises(ConfigError, match="download the file and give its path"):
        resolve_source("org/tiny")


def test_only_safe_files_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    source = ModelSource(kind="hub", name="org/tiny", revision=COMMIT)
    wanted = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "tokenizer.model"]
    weights = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["pytorch_model.bin", "x.pt", "modeling_x.py", "onnx/model.safetensors", "original/params.json"]
    others += ["consolidated.safetensors", "tf_model.h5", "README.md"]

    def taken() -> set[str]:
        options = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
        return set(filter_repo_objects(wanted + weights + others, **options))

    assert local_folder(source) == tmp_path
    assert taken() == {*wanted, *weights}
    assert (asked["repo"], asked["revision"]) == ("org/tiny", COMMIT)
    local_folder(source, weights=False)
    assert taken() == {*wanted, "model.safetensors.index.json"}


def test_a_failed_download_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **options: Any) -> str:
        raise OSError("connection reset\nlong story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"cannot download 'org/tiny'.*connection reset; try again"):
        local_folder(ModelSource(kind="hub", name="org/tiny", revision=COMMIT))


@pytest.mark.parametrize("offline", [False, True])
def test_a_cached_hub_model_loads_without_a_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offline: bool
) -> None:
    from batchgen_data.models.load import load_model

    snapshot = _cached_model(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    source = resolve_source("org/tiny")
    assert source == ModelSource(kind="hub", name="org/tiny", revision=COMMIT, cached_only=True)
    assert local_folder(source) == snapshot
    assert load_model(source, device=torch.device("cpu")).context_tokens == 1024
    with pytest.raises(ConfigError, match="unknown model"):
        resolve_source("org/tiny", "other-branch")


def test_messages_hold_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError) as raised:
        resolve_source("org/tiny")
    assert "hf_secret" not in json.dumps(str(raised.value))
