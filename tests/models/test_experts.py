"""The expert function: what it computes, and how threads share it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen_data.models import experts
from tiny_models import tiny_config


@pytest.fixture
def module() -> Any:
    """Eight experts, the least that two threads share."""
    config = tiny_config("qwen3_moe")
    config.num_experts = 8
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).model.layers[0].mlp.experts


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, 64, generator=generator)
    index = torch.rand(num_tokens, 8, generator=generator).argsort()[:, :3]
    return hidden, index, torch.rand(num_tokens, 3, generator=generator)


@torch.inference_mode()
def test_threads_that_share_experts_compute_what_one_does(
    module: Any, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = inputs(40)
    ran_in = set()
    run_expert = experts._run_expert

    def watched(*args: Any) -> torch.Tensor:
        ran_in.add((threading.current_thread().name.rpartition("_")[0], torch.get_num_threads()))
        both.wait(10)  # so that neither thread does all the work
        return run_expert(*args)

    both = threading.Barrier(2)
    monkeypatch.setattr(experts, "_run_expert", watched)
    shared = experts.run_experts(module, *arguments)
    assert ran_in == {("", 1), ("batchgen-expert", 1)}
    assert torch.get_num_threads() == 2
    monkeypatch.undo()
    torch.set_num_threads(1)
    assert torch.equal(shared, experts.run_experts(module, *arguments))
    torch.testing.assert_close(shared, by_the_formula(module, *arguments))


def by_the_formula(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    rows = []
    for x, chosen, gates in zip(hidden, index, weights, strict=True):
        gate, up = (module.gate_up_proj[chosen] @ x).chunk(2, dim=-1)
        outputs = module.down_proj[chosen] @ (torch.nn.functional.silu(gate) * up).unsqueeze(-1)
        rows.append(gates @ outputs.squeeze(-1))
    return torch.stack(rows)


@torch.inference_mode()
def test_what_an_expert_raises_in_another_thread_is_raised(
    module: Any, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("no such weights")
        other_failed.wait(10)
        return torch.zeros(args[2].shape)

    other_failed = threading.Event()
    monkeypatch.setattr(experts, "_run_expert", failing)
    threading.Timer(0.2, other_failed.set).start()
    with pytest.raises(ValueError, match="no such weights"):
        experts.run_experts(module, *inputs(40))
    assert torch.get_num_threads() == 2


@torch.inference_mode()
def test_ignored_ids_count_nothing_whatever_was_in_memory(module: Any) -> None:
    hidden, index, weights = inputs(5)
    want = experts.run_experts(module, hidden, index, torch.where(index == index[:, :1], 0.0, weights))
    beyond = index.clone()
    beyond[:, 0] = 8
    for _ in range(3):
        torch.full((15, 64), float("nan"))  # what an empty tensor may find
        torch.testing.assert_close(experts.run_experts(module, hidden, beyond, weights), want)
