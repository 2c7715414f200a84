"""Tiny random checkpoints of every architecture family the runtime serves, and of those it must refuse.

Weights are drawn so that a forward pass has something to say: logits spread over several units, every
layer and every expert moves them, norms, biases, sinks and router corrections are not at their defaults.
Sliding windows are 16 tokens, so that a prompt of a few dozen tokens meets them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

VOCAB_SIZE = 300
CONTEXT_TOKENS = 1024
SLIDING_WINDOW_TOKENS = 16
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2, 3
# The last: Qwen's tokenizer class adds it where it is missing, beyond the vocabulary of the model.
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")

CHATML_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Merged pairs after the 256 bytes, so that text has tokens of several characters; "Ġ" is a space.
_MERGES = """
    Ġ t|h e|i n|r e|o n|a t|e n|o r|i s|e r|Ġt he|in g|Ġ a|Ġ s|a n|Ġ w|Ġ o|n d|Ġ c|Ġ b
    Ġ f|o u|e s|Ġ p|Ġ m|Ġ in|Ġa nd|e d|Ġo f|Ġ h|Ġt o|l l|a r|i t|a l|Ġ d|l e|a s|Ã ©
"""

_IDS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
_DENSE: dict[str, Any] = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = dict(_DENSE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def _family(model_type: str, base: dict[str, Any], **changes: Any) -> Callable[[], PreTrainedConfig]:
    def config() -> PreTrainedConfig:
        # Copied: config classes write into the dicts and lists they are given.
        return AutoConfig.for_model(model_type, **copy.deepcopy({**base, **changes}))

    return config


def _without(base: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name not in names}


_DEEPSEEK_EXPERTS: dict[str, Any] = dict(
    _DENSE,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    num_mtp_layers=0,
)
# MLA: key width 24, value width 12, so that nothing may assume they are equal; a latent of 24 + 8 numbers.
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_GRANITE: dict[str, Any] = dict(
    _DENSE, embedding_multiplier=2.0, logits_scaling=1.5, residual_multiplier=0.8, attention_multiplier=0.3
)
_GEMMA: dict[str, Any] = dict(
    _DENSE,
    head_dim=16,
    query_pre_attn_scalar=12,
    sliding_window=SLIDING_WINDOW_TOKENS,
    layer_types=_ALTERNATING,
    tie_word_embeddings=True,
)

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _family("llama", _DENSE),
    "qwen2": _family("qwen2", _DENSE, tie_word_embeddings=True),
    "qwen3": _family("qwen3", _DENSE, head_dim=24),
    "mistral": _family("mistral", _DENSE, head_dim=16, sliding_window=SLIDING_WINDOW_TOKENS),
    "mixtral": _family("mixtral", _DENSE, num_local_experts=8, num_experts_per_tok=2, head_dim=16),
    "qwen2_moe": _family("qwen2_moe", _EXPERTS, shared_expert_intermediate_size=48),
    "qwen3_moe": _family("qwen3_moe", _EXPERTS, head_dim=16, norm_topk_prob=True),
    "olmoe": _family("olmoe", _without(_EXPERTS, "moe_intermediate_size"), intermediate_size=32),
    # Without a query latent, as in V2-Lite, and with routing by group.
    "deepseek_v2": _family(
        "deepseek_v2", {**_DEEPSEEK_EXPERTS, **_MLA}, q_lora_rank=None, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": _family("deepseek_v3", {**_DEEPSEEK_EXPERTS, **_MLA}),
    "glm4_moe_lite": _family("glm4_moe_lite", {**_DEEPSEEK_EXPERTS, **_MLA}),
    "gpt_oss": _family(
        "gpt_oss",
        _DENSE,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=32,
        head_dim=16,
        sliding_window=SLIDING_WINDOW_TOKENS,
        layer_types=_ALTERNATING,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": CONTEXT_TOKENS // 4,
        },
    ),
    "gemma2": _family("gemma2", _GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=12.0),
    "gemma3": _family("gemma3_text", _GEMMA),
    "phi3": _family(
        "phi3",
        _DENSE,
        sliding_window=SLIDING_WINDOW_TOKENS,
        original_max_position_embeddings=CONTEXT_TOKENS,
    ),
    "granite": _family("granite", _GRANITE),
    "granitemoe": _family(
        "granitemoe", _GRANITE, num_local_experts=8, num_experts_per_tok=2, intermediate_size=32
    ),
    "gpt2": _family(
        "gpt2",
        _IDS,
        n_positions=CONTEXT_TOKENS,
        n_embd=64,
        n_layer=3,
        n_head=4,
    ),
    "gpt_neox": _family("gpt_neox", _without(_DENSE, "num_key_value_heads")),
    "olmo2": _family("olmo2", _DENSE),
    "cohere": _family("cohere", _DENSE, logit_scale=0.5, use_qk_norm=True, tie_word_embeddings=True),
    "glm4": _family("glm4", _DENSE, head_dim=16),
    "glm4_moe": _family("glm4_moe", _DEEPSEEK_EXPERTS, head_dim=16, use_qk_norm=True),
    # The second layer has no rotary embedding.
    "smollm3": _family(
        "smollm3", _DENSE, no_rope_layers=[1, 0, 1], use_sliding_window=False, tie_word_embeddings=True
    ),
    "opt": _family(
        "opt",
        _without(_DENSE, "num_key_value_heads", "intermediate_size"),
        ffn_dim=96,
        word_embed_proj_dim=64,
        tie_word_embeddings=True,
    ),
    "starcoder2": _family("starcoder2", _DENSE, sliding_window=SLIDING_WINDOW_TOKENS),
    "minimax_m2": _family(
        "minimax_m2",
        _DENSE,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=32,
        head_dim=16,
    ),
    "ernie4_5_moe": _family(
        "ernie4_5_moe",
        _DENSE,
        moe_num_experts=8,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_intermediate_size=32,
        tie_word_embeddings=True,
    ),
}

# Attention outside the registry (falcon, bloom), or state other than KV (lfm2, qwen3_next).
REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon": _family(
        "falcon",
        _without(_DENSE, "num_key_value_heads", "intermediate_size"),
        ffn_hidden_size=96,
        tie_word_embeddings=True,
    ),
    "bloom": _family(
        "bloom",
        _IDS,
        hidden_size=64,
        n_layer=3,
        n_head=4,
        seq_length=CONTEXT_TOKENS,
    ),
    "lfm2": _family(
        "lfm2",
        _DENSE,
        block_multiple_of=16,
        layer_types=["conv", "full_attention", "conv"],
        tie_word_embeddings=True,
    ),
    "qwen3_next": _family(
        "qwen3_next",
        _EXPERTS,
        head_dim=16,
        shared_expert_intermediate_size=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return the family's tiny config, with `changes` set on it (for example `tie_word_embeddings`)."""
    config = (FAMILIES.get(family) or REFUSED[family])()
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build the family's model with random weights: fp32, eval mode, the same for the same seed."""
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
        _randomise(model)
    finally:
        torch.random.set_rng_state(generator_state)
    return model.eval()


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    # Gemma multiplies embeddings by sqrt(hidden_size), here 8.
    gemma = model.config.model_type.startswith("gemma")
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            # Small beside what the layers add, else a tied head only repeats its input.
            parameter.normal_(std=0.06 if gemma else 0.25)
        elif head is not None and parameter is head.weight:
            parameter.normal_(std=2.0 * parameter.shape[-1] ** -0.5)
        elif parameter.ndim >= 2:
            fan_in = min(parameter.shape[-2:]) if "experts" in name else parameter.shape[-1]
            parameter.normal_(std=2.0 * fan_in**-0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
            if gemma and name == "model.norm.weight":
                parameter.add_(3.0)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(std=0.3)


def tiny_tokenizer(
    bos: bool = True, chat_template: bool | str = True, added_tokens: int = 0, pad: bool = False
) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of `VOCAB_SIZE` tokens in memory.

    Args:
        bos: Whether plain text is encoded with `<s>` in front (the chat template writes it itself, once).
        chat_template: True for ChatML, False for none, or the template's text.
        added_tokens: Extra tokens `<extra_0>`... with ids from `VOCAB_SIZE` up; odd ones are special.
        pad: Whether there is a pad token (it is `</s>`, as in many published models).
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        tuple(merge.split(" ")) for line in _MERGES.strip().splitlines() for merge in line.strip().split("|")
    ]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    assert len(tokens) == len(set(tokens)) == VOCAB_SIZE
    backend = Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS_ID)]
        )
    for idx in range(added_tokens):
        backend.add_tokens([AddedToken(f"<extra_{idx}>", special=idx % 2 == 1, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        pad_token="</s>" if pad else None,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        tokenizer.chat_template = CHATML_TEMPLATE if chat_template is True else chat_template
    return tokenizer


def tiny_checkpoint(
    path: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    bos: bool = True,
    chat_template: bool | str = True,
    added_tokens: int = 0,
    pad: bool = False,
    generation: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny model and its tokenizer to the folder `path` as safetensors, and return it.

    Args:
        path: The folder; created when absent.
        family: A key of `FAMILIES` or `REFUSED`.
        seed: Seed of the weights.
        bos: See `tiny_tokenizer`.
        chat_template: See `tiny_tokenizer`.
        added_tokens: See `tiny_tokenizer`; the model's vocabulary grows with them.
        pad: See `tiny_tokenizer`.
        generation: Fields set on the generation config, for example `{"eos_token_id": [1, 7]}`.
        **changes: Fields set on the model's config.
    """
    folder = Path(path)
    if added_tokens:
        changes.setdefault("vocab_size", VOCAB_SIZE + added_tokens)
    model = tiny_model(family, seed, **changes)
    for name, value in (generation or {}).items():
        setattr(model.generation_config, name, value)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tiny_tokenizer(bos, chat_template, added_tokens, pad).save_pretrained(folder)
    return folder
