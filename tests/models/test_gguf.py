"""GGUF: the same model as its safetensors twin, converted once, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from batchgen_data.errors import ConfigError
from batchgen_data.models import gguf as gguf_module
from batchgen_data.models.gguf import converted_folder
from batchgen_data.models.load import load_model, resolve_source
from tiny_models import CONTEXT_TOKENS, EOS_ID, tiny_model, tiny_tokenizer

gguf = pytest.importorskip("gguf", reason="the optional package gguf is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchgen" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF and nothing else")
    return path


def _fake_convert(file: Path, staged: Path) -> None:
    (staged / "model.safetensors").write_bytes(file.read_bytes())


def _write_tiny_llama(path: Path) -> None:
    """Write the tiny llama as llama.cpp's converter would (it interleaves the rotary halves of q and k)."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    bpe = tokenizer.backend_tokenizer.to_str()
    import json

    writer.add_token_merges([" ".join(pair) for pair in json.loads(bpe)["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(tokenizer.chat_template)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        place = name.removesuffix(".weight")
        if place.startswith("model.layers."):
            _, _, layer, part = place.split(".", 3)
            target = f"blk.{layer}.{names[part]}"
        else:
            target = names[place]
        array = tensor.numpy()
        if target.endswith(("attn_q", "attn_k")):
            num_heads = config.num_attention_heads if target.endswith("q") else config.num_key_value_heads
            array = array.reshape(num_heads, 2, 8, -1).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{target}.weight", np.ascontiguousarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_model_it_was_made_from(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    _write_tiny_llama(path)
    # What lies beside the file is none of its business.
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 77}')
    capfd.readouterr()
    loaded = load_model(resolve_source(path), device=torch.device("cpu"))
    assert capfd.readouterr() == ("", "")
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        expected = tiny_model("llama")(ids).logits
        torch.testing.assert_close(loaded.model(ids).logits, expected, atol=1e-4, rtol=0)
    assert loaded.context_tokens == CONTEXT_TOKENS
    assert loaded.eos_token_ids == {EOS_ID}
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template
    text = "the quick brown fox, é"
    plain = loaded.tokenizer(text, add_special_tokens=False).input_ids
    assert plain == tiny_tokenizer()(text, add_special_tokens=False).input_ids
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [converted_folder(path).name]


def test_it_is_converted_once_and_again_when_the_content_changes(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(source: Path, staged: Path) -> None:
        calls.append(source)
        _fake_convert(source, staged)

    monkeypatch.setattr(gguf_module, "_convert", convert)
    first = converted_folder(file)
    assert converted_folder(file) == first
    assert (first.parent, len(calls)) == (cache, 1)
    copy = file.with_name("renamed.gguf")
    copy.write_bytes(file.read_bytes())
    assert converted_folder(copy) == first
    file.write_bytes(b"GGUF and nothing more")
    assert converted_folder(file) != first
    monkeypatch.setattr(gguf_module, "version", lambda package: "99.0")
    assert converted_folder(copy) != first
    assert len(calls) == 3


def test_concurrent_converters_do_the_work_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def convert(source: Path, staged: Path) -> None:
        calls.append(1)
        time.sleep(0.1)
        _fake_convert(source, staged)

    monkeypatch.setattr(gguf_module, "_convert", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(converted_folder(file))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert len(set(found)) == len(calls) == 1


def test_without_locks_the_second_converter_takes_the_firsts_folder(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, staged: Path) -> None:
        first = cache / staged.name.split(".")[1]
        first.mkdir()
        (first / "model.safetensors").write_bytes(b"first")
        _fake_convert(source, staged)

    monkeypatch.setattr(gguf_module, "_convert", convert)
    assert (converted_folder(file) / "model.safetensors").read_bytes() == b"first"
    assert not list(cache.glob(".*.*"))


def test_a_kill_leaves_no_half_folder(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, time, pathlib\n"
        "from batchgen_data.models import gguf\n"
        "def convert(file, staged):\n"
        "    (staged / 'model.safetensors').write_bytes(b'half')\n"
        "    print('half way', flush=True)\n"
        "    time.sleep(60)\n"
        "gguf._convert = convert\n"
        "gguf.converted_folder(pathlib.Path(sys.argv[1]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half way\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(list(cache.glob(".*.*"))) == 1
    assert not [path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".")]
    monkeypatch.setattr(gguf_module, "_convert", _fake_convert)
    assert (converted_folder(file) / "model.safetensors").read_bytes() == file.read_bytes()
    assert not list(cache.glob(".*.*"))


def test_the_cached_files_can_be_read_by_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, staged: Path) -> None:
        _fake_convert(source, staged)
        (staged / "model.safetensors").chmod(0o600)

    monkeypatch.setattr(gguf_module, "_convert", convert)
    folder = converted_folder(file)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_with_its_command(
    file: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(
        gguf_module.importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    with pytest.raises(ConfigError, match=rf"'{package}'.*pip install 'batchgen-data\[gguf\]'"):
        converted_folder(file)


@pytest.mark.parametrize("kind", ["magic_only", "truncated", "no_weights"])
def test_a_damaged_file_is_an_error_that_names_it_and_leaves_nothing(
    tmp_path: Path, cache: Path, kind: str
) -> None:
    path = tmp_path / "tiny.gguf"
    if kind == "no_weights":
        writer = gguf.GGUFWriter(path, "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    else:
        _write_tiny_llama(path)
        os.truncate(path, 4 if kind == "magic_only" else path.stat().st_size - 5000)
    with pytest.raises(ConfigError) as raised:
        converted_folder(path)
    assert str(path) in str(raised.value)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


def test_a_cache_that_cannot_be_written_is_said_so(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ConfigError, match="point XDG_CACHE_HOME"):
        converted_folder(file)
