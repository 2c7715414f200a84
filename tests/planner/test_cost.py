"""What a pass costs, and how one layer's graph looks under each plan."""

from __future__ import annotations

import dataclasses

import pytest

from batchgen_data.planner.cost import CostModel, PassCosts
from batchgen_data.planner.plan import Budget, Plan
from batchgen_data.planner.roofline import Roofline
from batchgen_data.planner.sizes import ModelSizes
from batchgen_data.planner.workload import PassShape
from planner_cases import DENSE, GIB, MIB, SPARSE, layer_costs, profile, sizes

DECODE = PassShape(64, 500)
BUDGET = Budget(device_bytes=GIB)


def cost(model: ModelSizes, plan: Plan, **changes: float) -> CostModel:
    return CostModel(model, profile(**changes), BUDGET, plan)


def test_a_resident_pass_is_the_sum_of_its_modules() -> None:
    model = cost(sizes(DENSE), Plan(kv_memory=GIB))
    costs = layer_costs()
    layer_s = costs.attention.seconds(64, kv_tokens=64 * 501) + costs.mlp.seconds(64)
    rest_s = 1e-3 + 64 * 1e-6 + 64 * 1e-5
    assert model.pass_s(DECODE) == pytest.approx(DENSE.count * layer_s + rest_s)
    assert model.pass_s(PassShape(0, 0)) == 0.0
    assert model.layer_graph(DENSE, DECODE).critical_path == ("attention", "MLP")


def test_sub_batches_attend_apart_and_experts_run_once() -> None:
    plan = Plan(kv_residence="host", host_memory=GIB, kv_memory=64 * MIB, attention_sub_batch=16)
    model = cost(sizes(SPARSE), plan)
    assert model.num_sub_batches(DECODE) == 4
    graph = model.layer_graph(SPARSE, DECODE)
    names = [node.name for node in graph.nodes if node.resource == "compute"]
    assert names == ["attention 1/4", "attention 2/4", "attention 3/4", "attention 4/4", "experts"]
    assert [node.name for node in graph.nodes if node.name.startswith("KV in")] == [
        "KV in 2/4",
        "KV in 3/4",
        "KV in 4/4",
        "KV in, next layer",
    ]
    split = cost(sizes(SPARSE), dataclasses.replace(plan, moe_batch_tokens=16))
    assert split.pass_s(DECODE) > model.pass_s(DECODE)
    apart = cost(sizes(SPARSE), dataclasses.replace(plan, yield_at=("model.layers.*.self_attn",)))
    assert apart.pass_s(DECODE) > model.pass_s(DECODE)
    names = [node.name for node in apart.layer_graph(SPARSE, DECODE).nodes if node.resource == "compute"]
    assert names[:2] == ["attention 1/4", "MLP 1/4"]


def test_the_staging_alone_cuts_a_dense_pass_too() -> None:
    page_bytes = 64 * DENSE.kv_token_bytes
    plan = Plan(kv_residence="host", host_memory=GIB, kv_memory=2 * 160 * page_bytes)
    model = cost(sizes(DENSE), plan)
    # 64 rows of 500 tokens are 532 pages with the half-filled ones: four halves of 160.
    assert model.num_sub_batches(DECODE) == 4
    names = [node.name for node in model.layer_graph(DENSE, DECODE).nodes if node.resource == "compute"]
    assert names[:4] == ["attention 1/4", "MLP 1/4", "attention 2/4", "MLP 2/4"]
    combined = cost(sizes(DENSE), dataclasses.replace(plan, yield_at=("*.mlp",)), copy_bytes_s=1e13)
    names = [node.name for node in combined.layer_graph(DENSE, DECODE).nodes if node.resource == "compute"]
    assert names == ["attention 1/4", "attention 2/4", "attention 3/4", "attention 4/4", "MLP"]
    # Below the corner of the roofline it takes four times as long for a quarter of the tokens.
    apart = cost(sizes(DENSE), plan, copy_bytes_s=1e13)
    assert combined.pass_s(DECODE) < apart.pass_s(DECODE)


def test_streamed_layers_take_what_their_reading_takes() -> None:
    model = sizes(DENSE)
    plan = Plan(weights_memory=model.least_weights_bytes, kv_memory=GIB)
    slow = cost(model, plan, disk_bytes_s=1e8)
    graph = slow.layer_graph(DENSE, DECODE)
    assert graph.critical_path == ("weights, next layer",)
    assert graph.seconds == pytest.approx(DENSE.core_bytes / 1e8)
    fast = cost(model, plan, disk_bytes_s=1e15)
    assert fast.pass_s(DECODE) == pytest.approx(cost(model, Plan(kv_memory=GIB)).pass_s(DECODE))
    half = Plan(weights_memory=model.least_weights_bytes + model.layers_bytes // 2, kv_memory=GIB)
    assert cost(model, half, disk_bytes_s=1e8).pass_s(DECODE) == pytest.approx(
        slow.pass_s(DECODE) / 2, rel=0.1
    )


def test_a_checkpoint_of_half_the_bytes_is_read_in_half_the_time() -> None:
    plan = Plan(weights_memory=sizes(DENSE).least_weights_bytes, kv_memory=GIB)
    full = cost(sizes(DENSE), plan, disk_bytes_s=1e8).layer_graph(DENSE, DECODE).seconds
    half = cost(sizes(DENSE, stored_share=0.5), plan, disk_bytes_s=1e8).layer_graph(DENSE, DECODE).seconds
    assert half == pytest.approx(full / 2)


def test_experts_are_read_as_needed() -> None:
    model = sizes(SPARSE)
    plan = Plan(weights_memory=model.least_weights_bytes, kv_memory=GIB)
    streaming = cost(model, plan, disk_bytes_s=1e8)
    one, many = PassShape(1, 100), PassShape(64, 100)
    few_s = streaming.layer_graph(SPARSE, one).busy_s("disk")
    assert few_s == pytest.approx((4 * SPARSE.expert_bytes + SPARSE.core_bytes) / 1e8, rel=0.01)
    all_s = streaming.layer_graph(SPARSE, many).busy_s("disk")
    assert all_s == pytest.approx((32 * SPARSE.expert_bytes + SPARSE.core_bytes) / 1e8, rel=0.01)
    # One row waits for its router before it knows which experts to read.
    graph = streaming.layer_graph(SPARSE, one)
    assert graph.spans["experts 1/4 read"].start_s >= graph.spans["attention"].end_s


def test_copies_cost_a_processor_that_computes_too() -> None:
    plan = Plan(kv_residence="host", host_memory=GIB, kv_memory=64 * MIB, attention_sub_batch=16)
    free = cost(sizes(SPARSE), plan, copy_bytes_s=1e9)
    shared = cost(sizes(SPARSE), plan, copy_bytes_s=1e9, copy_share=0.5)
    assert shared.pass_s(DECODE) > free.pass_s(DECODE)


def test_lanes_are_for_wide_passes_of_resident_models() -> None:
    slow_rest = PassCosts({"dense": layer_costs()}, Roofline(fixed_s=100.0))
    known = dataclasses.replace(profile(), lanes=slow_rest, lane_tokens=32)
    model = sizes(DENSE)
    resident = CostModel(model, known, BUDGET, Plan(kv_memory=GIB))
    assert resident.pass_s(PassShape(32, 10)) > 100
    assert resident.pass_s(PassShape(31, 10)) < 1
    staged = CostModel(model, known, BUDGET, Plan(kv_residence="host", host_memory=GIB, kv_memory=GIB))
    assert staged.pass_s(PassShape(32, 10)) < 1
