"""Yield points: which modules patterns choose, which are refused, and that combining changes no result."""

from __future__ import annotations

import pytest
import torch

from batchgen_data.errors import ConfigError
from batchgen_data.models.wrap import install_layer_barriers, install_yield_points, sparse_blocks
from batchgen_data.runtime.coroutine import CoroutineCounts, run_sub_batches
from tiny_models import VOCAB_SIZE, tiny_model

NUM_LAYERS = 3


def inputs(lengths=(5, 1, 8)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, VOCAB_SIZE, (1, length), generator=generator) for length in lengths]


@torch.inference_mode()
def logits_together(model, most_tokens=None):
    """The logits of each input as a sub-batch, and the counts."""
    counts = CoroutineCounts()

    def forward(ids):
        return lambda: model(input_ids=ids, use_cache=False).logits

    results = run_sub_batches([forward(ids) for ids in inputs()], counts, most_tokens=most_tokens)
    return results, counts


@torch.inference_mode()
def logits_apart(family):
    model = tiny_model(family)
    return [model(input_ids=ids, use_cache=False).logits for ids in inputs()]


def assert_close(found, expected):
    for result, want in zip(found, expected, strict=True):
        assert float((result - want).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "family,names",
    [
        ("mixtral", ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp"]),
        ("gpt_oss", ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp"]),
        ("granitemoe", [f"model.layers.{layer}.block_sparse_moe" for layer in range(3)]),
        ("deepseek_v3", ["model.layers.1.mlp", "model.layers.2.mlp"]),
        ("llama", []),
    ],
)
def test_without_patterns_the_sparse_blocks_are_chosen(family, names):
    model = tiny_model(family)
    assert len(sparse_blocks(model)) == len(names)
    assert install_yield_points(model) == names
    results, counts = logits_together(model)
    assert_close(results, logits_apart(family))
    assert (counts.yields, counts.combines) == (3 * len(names), len(names))


@pytest.mark.parametrize(
    "family,patterns,combines",
    [
        ("llama", ["model.layers.*.mlp"], NUM_LAYERS),
        ("llama", ["model.layers.0.mlp", "model.layers.2.mlp"], 2),
        ("llama", ["*layernorm"], 2 * NUM_LAYERS),
        ("llama", ["model.embed_tokens", "model.norm", "lm_head"], 3),
        ("llama", ["*.q_proj", "*.down_proj"], 2 * NUM_LAYERS),
        ("gpt2", ["transformer.h.*.mlp"], NUM_LAYERS),
        ("opt", ["model.decoder.layers.*.fc1"], NUM_LAYERS),
        ("mixtral", ["model.layers.*.mlp"], NUM_LAYERS),
        # The router takes and returns tokens as the first dimension, and returns three tensors.
        ("mixtral", ["model.layers.*.mlp.gate"], NUM_LAYERS),
        ("deepseek_v3", ["model.layers.*.mlp"], NUM_LAYERS),
        ("deepseek_v3", ["model.layers.*.mlp.shared_experts"], NUM_LAYERS - 1),
    ],
)
@pytest.mark.parametrize("most_tokens", [None, 4])
def test_patterns_choose_any_module_of_hidden_states(family, patterns, combines, most_tokens):
    model = tiny_model(family)
    assert len(install_yield_points(model, patterns)) == combines
    results, counts = logits_together(model, most_tokens)
    assert_close(results, logits_apart(family))
    assert (counts.yields, counts.combines) == (3 * combines, combines)
    assert counts.combined_tokens == combines * sum(ids.shape[1] for ids in inputs())
    assert counts.calls == combines * (1 if most_tokens is None else 4)


def test_of_modules_within_each_other_the_outer_one_is_taken():
    model = tiny_model("llama")
    names = install_yield_points(model, ["model.layers.*.mlp*", "model.layers.1.mlp.up_proj"])
    assert names == [f"model.layers.{layer}.mlp" for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize(
    "pattern,near",
    [
        ("model.layers.*.mpl", "model.layers.*.mlp"),
        ("layers.*.mlp", "model.layers.*.mlp"),
        ("model.layers.7.mlp", "model.layers.*.mlp"),
        ("model.layers.*.input_layer_norm", "model.layers.*.input_layernorm"),
        ("", "model.norm"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest_modules(pattern, near):
    with pytest.raises(ConfigError, match="no module of LlamaForCausalLM matches") as caught:
        install_yield_points(tiny_model("llama"), [pattern])
    assert repr(pattern) in str(caught.value)
    nearest = str(caught.value).partition("the nearest yield points are ")[2]
    assert nearest
    if pattern:
        assert near in nearest


@pytest.mark.parametrize(
    "family,pattern,why",
    [
        ("llama", "model.layers.*.self_attn", "takes hidden_states, .*position_embeddings"),
        ("llama", "model.layers.*", "takes hidden_states, .*attention_mask"),
        ("llama", "model.rotary_emb", "takes x, position_ids"),
        ("llama", "model", "takes .*input_ids"),
        ("llama", "model.layers", "is not called in a forward pass"),
        ("mixtral", "model.layers.*.mlp.experts", "takes hidden_states, top_k_index, top_k_weights"),
    ],
)
def test_modules_where_sub_batches_cannot_be_combined_are_refused(family, pattern, why):
    model = tiny_model(family)
    with pytest.raises(ConfigError, match=why) as caught:
        install_yield_points(model, [pattern])
    assert "the nearest yield points are model." in str(caught.value)
    # Nothing is half installed.
    _, counts = logits_together(model)
    assert counts.yields == 0


def test_layer_barriers_let_all_sub_batches_finish_a_layer_before_the_next():
    model = tiny_model("mixtral")
    order = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: order.append(("enter", number)))
        layer.register_forward_hook(lambda *_, number=number: order.append(("leave", number)))
    install_yield_points(model)
    install_layer_barriers(model)
    results, counts = logits_together(model)
    assert_close(results, logits_apart("mixtral"))
    assert (counts.barriers, counts.combines) == (3 * NUM_LAYERS, NUM_LAYERS)
    # Hooks run before the barrier: a layer is entered by all once the one before is left by all.
    computed = [number for kind, number in order if kind == "leave"]
    assert computed == [0] * 3 + [1] * 3 + [2] * 3


def test_barriers_stand_outside_of_what_brings_the_weights():
    model = tiny_model("llama")
    arrived = []
    for number, layer in enumerate(model.model.layers):
        original = layer.forward

        def forward(*args, number=number, original=original, **kwargs):
            arrived.append(number)
            return original(*args, **kwargs)

        layer.forward = forward
    install_layer_barriers(model)
    results, _ = logits_together(model)
    assert_close(results, logits_apart("llama"))
    assert arrived == [0] * 3 + [1] * 3 + [2] * 3
