"""Multi-head latent attention: the compressed latents in KV pages, not the heads they expand to.

DeepSeek-V2 and -V3 and models built like them compute keys and values of all heads from one latent and one
rotary key per token (512 + 64 numbers; the 128 heads of DeepSeek-V3 are 40,960). transformers makes heads of
them in one place, the attention module's `expand_kv`, right before attention. `keep_latents` puts a function
there that hands latent and rotary key on as they are: one key head, and values of width 0, since latents are
their own values. KV pages, tiers and transfers then hold them like any other keys; only attention differs
(`batchgen_kernels.mla_attention_decode`), and takes the up-projection from the module when it runs, so that
streamed weights are the right ones.

A cache object passed as `cache=` sees the same latents in its `update`, but what it returns is expanded all
the same, and each sub-batch would need one of its own; the function here keeps no state.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")


def keep_latents(model: PreTrainedModel) -> bool:
    """Let every attention module with latents hand them on unexpanded; say whether the model has such."""
    modules = [module for module in model.modules() if _has_latents(module)]
    for module in modules:
        module.expand_kv = _hand_on
    return bool(modules)


def expand_heads(model: PreTrainedModel) -> None:
    """Undo `keep_latents`."""
    for module in model.modules():
        if keeps_latents(module):
            del module.expand_kv


def keeps_latents(module: torch.nn.Module) -> bool:
    """Whether the module's keys are latents, by `keep_latents`."""
    return vars(module).get("expand_kv") is _hand_on


def up_projection(module: Any) -> torch.Tensor:
    """[H, U, R], of each head the rows that make its keys, then those that make its values."""
    rows = module.qk_nope_head_dim + module.v_head_dim
    return module.kv_b_proj.weight.view(-1, rows, module.kv_lora_rank)


def _has_latents(module: torch.nn.Module) -> bool:
    # A bias, or weights that are no plain matrix, would have to be brought to the other side too.
    project = getattr(module, "kv_b_proj", None)
    return (
        callable(getattr(module, "expand_kv", None))
        and type(project) is torch.nn.Linear
        and project.bias is None
        and all(isinstance(getattr(module, name, None), int) for name in _SIZES)
    )


def _hand_on(latent_11TR: torch.Tensor, rope_11TS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `expand_kv`: keys [1, 1, T, R + S] and values [1, 1, T, 0]."""
    key_11TC = torch.cat([latent_11TR, rope_11TS], dim=-1)
    return key_11TC, key_11TC[..., :0]
