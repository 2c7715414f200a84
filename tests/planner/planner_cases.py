"""Models, profiles and problems made up for the planner's tests."""

from __future__ import annotations

from typing import Any

from batchgen_data.planner.cost import LayerCosts, PassCosts, Profile
from batchgen_data.planner.plan import Budget
from batchgen_data.planner.roofline import Roofline
from batchgen_data.planner.search import Problem
from batchgen_data.planner.sizes import LayerSizes, ModelSizes
from batchgen_data.planner.workload import Workload

MIB, GIB = 2**20, 2**30

DENSE = LayerSizes(count=8, core_bytes=64 * MIB, kv_token_bytes=4096, feed_forward="model.layers.*.mlp")
SPARSE = LayerSizes(
    count=8,
    core_bytes=16 * MIB,
    kv_token_bytes=2048,
    num_experts=32,
    experts_per_token=4,
    expert_bytes=8 * MIB,
    feed_forward="model.layers.*.mlp",
)


def sizes(*layers: LayerSizes, **changes: Any) -> ModelSizes:
    given = {
        "architecture": "Made",
        "layers": layers or (DENSE,),
        "other_bytes": 64 * MIB,
        "token_bytes": 10_000,
        "logits_bytes": 100_000,
        "context_tokens": 4096,
        "num_parameters": 10**9,
    }
    return ModelSizes(**{**given, **changes})


def layer_costs(per_token_s: float = 2e-5, knee: float = 64.0, kv_s: float = 2e-8) -> LayerCosts:
    return LayerCosts(
        Roofline(
            fixed_s=1e-4,
            per_token_s=per_token_s,
            knee_tokens=knee,
            terms={"kv_tokens": kv_s, "prefill_pairs": 1e-9, "chunks": 1e-5},
        ),
        Roofline(per_token_s=per_token_s, knee_tokens=knee, terms={"experts_hit": 2e-4}),
    )


def profile(**changes: Any) -> Profile:
    costs = PassCosts(
        {kind: layer_costs() for kind in ("dense", "sparse")},
        Roofline(fixed_s=1e-3, per_token_s=1e-5, terms={"tokens": 1e-6}),
    )
    given = {
        "together": costs,
        "sub_batch_s": 2e-5,
        "copy_bytes_s": 10e9,
        "disk_bytes_s": 1e9,
    }
    return Profile(**{**given, **changes})


def problem(**changes: Any) -> Problem:
    given = {
        "sizes": sizes(),
        "profile": profile(),
        "budget": Budget(device_bytes=4 * GIB, host_bytes=8 * GIB),
        "workload": Workload.uniform(100, 100, 50),
    }
    return Problem(**{**given, **changes})
