"""Loading: every weight accounted for, heads tied as the checkpoint means it, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from batchgen_data.errors import ConfigError, UnsafeModelError
from batchgen_data.models.load import LoadedModel, load_model, load_tokenizer, resolve_source
from tiny_models import (
    CONTEXT_TOKENS,
    EOS_ID,
    FAMILIES,
    IM_END_ID,
    VOCAB_SIZE,
    tiny_checkpoint,
    tiny_model,
    tiny_tokenizer,
)

CPU = torch.device("cpu")
IDS = torch.arange(5, 45)[None]


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(resolve_source(folder), device=CPU, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_loads_with_its_own_weights(tmp_path: Path, family: str) -> None:
    loaded = load(tiny_checkpoint(tmp_path, family))
    torch.testing.assert_close(logits(loaded.model), logits(tiny_model(family)), atol=1e-4, rtol=0)
    assert loaded.context_tokens == CONTEXT_TOKENS
    assert loaded.eos_token_ids == {EOS_ID}
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer.is_fast
    assert max(loaded.tokenizer.get_vocab().values()) < VOCAB_SIZE


def test_a_sharded_checkpoint_loads(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    model = tiny_model("llama")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(logits(load(folder).model), logits(model), atol=1e-4, rtol=0)


def test_dtype_is_fp32_on_a_cpu_unless_asked_for(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    assert load(folder).model.dtype == torch.float32
    assert load(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_what_the_generation_config_asks_for_in_vain_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    assert load(folder).ignored_generation_settings == {}
    (folder / "generation_config.json").write_text(
        json.dumps({"no_repeat_ngram_size": 2, "suppress_tokens": [7], "stop_strings": ["User:"]})
    )
    with caplog.at_level(logging.WARNING, "batchgen_data"):
        loaded = load(folder)
    assert loaded.ignored_generation_settings == {"no_repeat_ngram_size": 2, "suppress_tokens": [7]}
    assert loaded.sampling_defaults.stop == ("User:",)
    (record,) = caplog.records
    assert "no_repeat_ngram_size, suppress_tokens" in record.getMessage()


def test_the_logging_of_transformers_is_as_it_was_afterwards(tmp_path: Path) -> None:
    from transformers.utils import logging as transformers_logging

    root = logging.getLogger("transformers")
    before = root.handlers[:], root.propagate, root.level
    transformers_logging.enable_progress_bar()
    load(tiny_checkpoint(tmp_path / "whole", "llama"))
    assert not transformers_logging.is_progress_bar_enabled()  # tiny_checkpoint switches it off
    transformers_logging.enable_progress_bar()
    with pytest.raises(ConfigError):
        load_tokenizer(resolve_source(tmp_path, needs="tokenizer"))
    assert transformers_logging.is_progress_bar_enabled()
    assert (root.handlers, root.propagate, root.level) == before


def test_nothing_is_printed_while_loading(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError):
        load(folder)
    load(tiny_checkpoint(tmp_path / "whole", "qwen2"))
    assert capfd.readouterr() == ("", "")


# Case 40: tie flag true or false, head tensor present or absent.


def test_case_40_tied_and_no_head_tensor_is_tied(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen2")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load(folder).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits(model), logits(tiny_model("qwen2")), atol=1e-4, rtol=0)


def test_case_40_untied_and_no_head_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"missing from the checkpoint: lm_head\.weight"):
        load(folder)


def test_case_40_untied_and_a_head_tensor_stays_separate(tmp_path: Path) -> None:
    model = load(tiny_checkpoint(tmp_path, "llama")).model
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    torch.testing.assert_close(logits(model), logits(tiny_model("llama")), atol=1e-4, rtol=0)


@pytest.mark.parametrize("head", ["equal", "different"])
def test_case_40_tied_and_a_head_tensor_does_as_transformers_does(tmp_path: Path, head: str) -> None:
    """transformers ties only heads equal to the embedding; a different one is used as it stands."""
    folder = tiny_checkpoint(tmp_path, "qwen2")

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if head == "equal" else embedding.flip(0).contiguous()

    edit_weights(folder, add_head)
    model = load(folder).model
    reference = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(model), logits(reference), atol=1e-4, rtol=0)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == (head == "equal")
    assert torch.equal(model.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


def test_weights_that_do_not_fit_are_all_named_in_one_error(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.extra.weight"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.ones(65)

    edit_weights(folder, spoil)
    with pytest.raises(ConfigError) as raised:
        load(folder)
    message = str(raised.value)
    assert "missing from the checkpoint: model.layers.1.mlp.up_proj.weight" in message
    assert "not in the model: model.layers.0.extra.weight" in message
    assert "model.norm.weight (65,), expected (64,)" in message


def test_weights_of_more_layers_than_the_config_says_are_an_error(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    edit_json(folder / "config.json", num_hidden_layers=2, layer_types=None)
    with pytest.raises(ConfigError, match=r"not in the model: model\.layers\.2\..* and 1 more"):
        load(folder)


def test_a_missing_expert_is_an_error_that_names_the_experts(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "mixtral")
    dropped = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    edit_weights(folder, lambda tensors: tensors.pop(dropped))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load(folder)


def test_buffers_that_old_checkpoints_carry_are_benign(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    torch.testing.assert_close(logits(load(folder).model), logits(tiny_model("llama")), atol=1e-4, rtol=0)


# What cannot generate.


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration.*encoder-decoder"):
        load(tmp_path)


@pytest.mark.parametrize(
    "architectures, why",
    [
        (["BertForMaskedLM"], "no causal language model"),
        (["BertLMHeadModel"], "both directions"),
        (None, "both"),
    ],
)
def test_a_bidirectional_model_is_refused_by_name(
    tmp_path: Path, architectures: list[str] | None, why: str
) -> None:
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertForMaskedLM(config).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=architectures)
    with pytest.raises(ConfigError, match=f"Bert.*{why}"):
        load(tmp_path)


def test_a_classifier_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ConfigError, match="LlamaForSequenceClassification"):
        load(folder)


def test_a_multimodal_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gemma3")
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ConfigError, match="Gemma3ForConditionalGeneration"):
        load(folder)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    edit_json(folder / "config.json", model_type="llama9")
    with pytest.raises(ConfigError, match="llama9"):
        load(folder)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="quantised"):
        load(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model_type": "llama", "hidden_size": "many"}', "\x00\xff"]
)
def test_a_broken_config_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(folder)


# Context, end tokens, tokenizers.


def test_the_context_comes_from_the_config_and_can_be_lowered_but_not_raised(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gpt2")
    assert load(folder).context_tokens == CONTEXT_TOKENS
    assert load(folder, max_context_tokens=100).context_tokens == 100
    with pytest.raises(ConfigError, match="1025 is more than the model's context of 1024"):
        load(folder, max_context_tokens=CONTEXT_TOKENS + 1)
    with pytest.raises(ConfigError, match="at least 1"):
        load(folder, max_context_tokens=0)


def test_no_context_length_is_an_error_unless_given(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "bloom")
    edit_json(folder / "config.json", seq_length=None)
    with pytest.raises(ConfigError, match="set max_context_tokens"):
        load(folder)
    assert load(folder, max_context_tokens=77).context_tokens == 77


def test_case_35_every_listed_end_token_counts(tmp_path: Path) -> None:
    loaded = load(tiny_checkpoint(tmp_path, "llama", generation={"eos_token_id": [2, 7]}))
    assert loaded.eos_token_ids == {2, 7, EOS_ID}


def test_case_35_the_tokenizers_end_token_counts_too(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    edit_json(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    assert load(folder).eos_token_ids == {EOS_ID, IM_END_ID}


@pytest.mark.parametrize("pad", [False, True])
def test_case_34_no_pad_token_or_one_equal_to_the_end_token(tmp_path: Path, pad: bool) -> None:
    loaded = load(tiny_checkpoint(tmp_path, "llama", pad=pad))
    assert loaded.tokenizer.pad_token_id == (EOS_ID if pad else None)
    assert loaded.eos_token_ids == {EOS_ID}
    assert loaded.model.get_input_embeddings().num_embeddings == VOCAB_SIZE
    assert loaded.tokenizer("hi").input_ids[0] == 0


def test_case_43_added_tokens_keep_their_ids_and_text(tmp_path: Path) -> None:
    loaded = load(tiny_checkpoint(tmp_path, "llama", added_tokens=5))
    tokenizer = loaded.tokenizer
    assert len(tokenizer) == VOCAB_SIZE + 5
    assert loaded.model.get_output_embeddings().weight.shape[0] == VOCAB_SIZE + 5
    for idx in range(5):
        assert tokenizer.decode([VOCAB_SIZE + idx]) == f"<extra_{idx}>"
        shown = tokenizer.decode([VOCAB_SIZE + idx], skip_special_tokens=True)
        assert shown == ("" if idx % 2 else f"<extra_{idx}>")


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": ["a", 7]}', '{"eos_token_id": [null, 7]}'])
def test_case_35_a_broken_generation_config_is_not_passed_over(tmp_path: Path, text: str) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(folder)


def test_the_generation_configs_sampling_becomes_the_default(tmp_path: Path) -> None:
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    loaded = load(tiny_checkpoint(tmp_path, "llama", generation=sampling))
    assert loaded.sampling_defaults.temperature == 0.6
    assert loaded.sampling_defaults.top_p == 0.9


def test_another_tokenizer_can_be_given_without_a_config(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "llama", chat_template=False)
    other = tmp_path / "tokenizer"
    tiny_tokenizer(bos=False).save_pretrained(other)
    tokenizer = load_tokenizer(resolve_source(folder), str(other))
    assert tokenizer.bos_token is None
    assert tokenizer.chat_template
    assert load(folder, tokenizer=tokenizer).tokenizer is tokenizer


@pytest.mark.parametrize("spoil", ["remove", "truncate", "nonsense"])
def test_no_usable_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path, spoil: str) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    file = folder / "tokenizer.json"
    if spoil == "remove":
        file.unlink()
    elif spoil == "truncate":
        file.write_text(file.read_text()[:1000])
    else:
        file.write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match="tokenizer") as raised:
        load_tokenizer(resolve_source(folder))
    assert str(folder) in str(raised.value)


def test_a_kernel_named_by_the_config_is_not_fetched(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "mixtral")
    edit_json(
        folder / "config.json", attn_implementation="evil/attention", experts_implementation="evil/experts"
    )
    loaded = load(folder)
    assert "evil" not in str(loaded.model.config._attn_implementation)
    assert "evil" not in str(loaded.model.config._experts_implementation)


def test_a_tokenizer_that_needs_code_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "code.Tokenizer"]})
    with pytest.raises(UnsafeModelError, match=r"tokenizer_config\.json.*auto_map"):
        load_tokenizer(resolve_source(folder, needs="tokenizer"))
