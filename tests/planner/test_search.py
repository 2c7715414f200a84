"""The search finds what trying everything finds, and what cannot fit is said in bytes."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_data.errors import PlanError
from batchgen_data.planner.cost import CostModel
from batchgen_data.planner.plan import Budget, Plan
from batchgen_data.planner.search import (
    TIE,
    Problem,
    candidates,
    kv_capacity_tokens,
    plan_bytes,
    search,
    what_helps,
)
from batchgen_data.planner.workload import Workload, passes
from planner_cases import DENSE, GIB, MIB, SPARSE, problem, profile, sizes


def seconds(problem: Problem, plan: Plan) -> float:
    """The batch completion time under a plan, with none of the search's shortcuts."""
    cost = CostModel(problem.sizes, problem.profile, problem.budget, plan, problem.page_tokens)
    shapes = passes(
        problem.workload,
        max_sequences=plan.max_sequences,
        max_step_tokens=plan.max_step_tokens,
        capacity_tokens=kv_capacity_tokens(problem, plan),
    )
    return sum(count * cost.pass_s(shape) for shape, count in shapes.items())


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    layer = draw(st.sampled_from((DENSE, SPARSE)))
    model = sizes(dataclasses.replace(layer, count=draw(st.integers(1, 6))))
    weights = model.weights_bytes
    return problem(
        sizes=model,
        profile=profile(
            disk_bytes_s=draw(st.floats(1e8, 1e10)),
            copy_bytes_s=draw(st.floats(1e8, 1e11)),
            copy_share=draw(st.sampled_from((0.0, 0.5))),
        ),
        budget=Budget(
            device_bytes=model.least_weights_bytes + draw(st.integers(64 * MIB, weights + 512 * MIB)),
            host_bytes=draw(st.sampled_from((0, 256 * MIB, 4 * GIB))),
        ),
        workload=Workload.uniform(
            draw(st.sampled_from((1, 7, 60))), draw(st.integers(1, 300)), draw(st.integers(1, 60))
        ),
    )


@settings(max_examples=25, deadline=None)
@given(problems())
def test_the_search_finds_what_trying_everything_finds(given: Problem) -> None:
    plans = list(candidates(given))
    choice = search(given)
    assert choice.num_considered == len(plans)
    times = sorted(seconds(given, plan) for plan in plans)
    best = choice.best.prediction
    assert best is not None
    assert best.bct_s == pytest.approx(seconds(given, choice.best))
    assert best.bct_s <= times[0] * (1 + TIE) * (1 + 1e-9)
    slower = [time for time in times if time > best.bct_s * 1.001]
    if choice.runner_up is None:
        assert not slower
    else:
        second = choice.runner_up.prediction
        assert second is not None
        assert second.bct_s == pytest.approx(slower[0])


@settings(max_examples=25, deadline=None)
@given(problems())
def test_every_candidate_fits(given: Problem) -> None:
    for plan in candidates(given):
        device, host = plan_bytes(given, plan)
        assert device <= given.budget.device_bytes
        assert host <= given.budget.host_bytes
        assert kv_capacity_tokens(given, plan) >= 2 * given.page_tokens
        if plan.weights_memory is not None:
            assert plan.weights_memory >= given.sizes.least_weights_bytes
        assert plan.max_step_tokens >= plan.max_sequences


def test_what_fits_stays_on_the_device() -> None:
    best = search(problem()).best
    assert (best.weights_memory, best.kv_residence, best.attention_sub_batch) == (None, "device", None)
    assert best.max_sequences == 128  # the next step above 100 rows


def test_weights_larger_than_the_device_are_streamed_for_as_many_rows_as_possible() -> None:
    best = search(problem(budget=Budget(device_bytes=400 * MIB))).best
    assert best.weights_memory is not None
    assert best.max_sequences > 8
    # Every pass reads what is left out: most of its time is the disk's.
    prediction = best.prediction
    assert prediction is not None
    assert prediction.step_s > 0.3


def test_few_pages_on_the_device_send_kv_of_a_sparse_model_to_the_host() -> None:
    """Attention is cheap, experts are dear below many tokens, and the device holds the KV of few rows."""
    model = sizes(SPARSE, other_bytes=16 * MIB)
    tight = Budget(device_bytes=model.weights_bytes + 160 * MIB, host_bytes=8 * GIB)
    workload = Workload.uniform(256, 200, 100)
    host = search(problem(sizes=model, budget=tight, workload=workload)).best
    assert host.kv_residence == "host"
    assert host.attention_sub_batch is not None
    assert host.prediction is not None
    no_host = search(
        problem(sizes=model, budget=dataclasses.replace(tight, host_bytes=0), workload=workload)
    ).best
    assert no_host.prediction is not None
    assert host.prediction.bct_s < no_host.prediction.bct_s


def test_what_the_caller_set_stays() -> None:
    given = {"max_sequences": 16, "kv_memory": 64 * MIB}
    choice = search(problem(given=given))
    for plan in (choice.best, choice.runner_up):
        assert plan is not None
        assert (plan.max_sequences, plan.kv_memory) == (16, 64 * MIB)


def test_given_memory_for_weights_is_used_or_means_all() -> None:
    streamed = search(problem(given={"weights_memory": 300 * MIB})).best
    assert streamed.weights_memory == 300 * MIB
    assert search(problem(given={"weights_memory": 8 * GIB})).best.weights_memory is None


def test_what_helps_names_the_disk_where_weights_are_streamed() -> None:
    tight = problem(budget=Budget(device_bytes=300 * MIB))
    helps = what_helps(tight, search(tight)).helps
    assert [help.what for help in helps][:2] in (
        ["twice the device memory", "twice the disk bandwidth"],
        ["twice the disk bandwidth", "twice the device memory"],
    )
    assert all(help.times_sooner > 1.2 for help in helps[:2])
    roomy = problem()
    assert all(help.times_sooner < 1.05 for help in what_helps(roomy, search(roomy)).helps)


def test_what_cannot_fit_says_bytes_needed_present_and_what_to_change() -> None:
    with pytest.raises(PlanError) as caught:
        search(problem(budget=Budget(device_bytes=100 * MIB)))
    message = str(caught.value)
    needed, present = (
        int(number.replace(",", ""))
        for number in re.findall(r"needs ([\d,]+) bytes.*there are ([\d,]+)", message)[0]
    )
    assert present == 100 * MIB
    assert "or use a smaller dtype" in message
    # What it asks for is enough, and one byte in ten less is not.
    assert search(problem(budget=Budget(device_bytes=needed), workload=Workload.uniform(1, 10, 10)))
    with pytest.raises(PlanError):
        search(problem(budget=Budget(device_bytes=needed * 9 // 10), workload=Workload.uniform(1, 10, 10)))


def test_options_that_leave_no_plan_are_named() -> None:
    with pytest.raises(PlanError, match=r"kv_memory=8589934592.*change the options"):
        search(problem(given={"kv_memory": 8 * GIB}))


def test_windows_limit_what_attention_reads() -> None:
    windowed = dataclasses.replace(DENSE, window=16)
    long = Workload.uniform(20, 2000, 100)
    times = []
    for layer in (DENSE, windowed):
        prediction = search(problem(sizes=sizes(layer), workload=long)).best.prediction
        assert prediction is not None
        times.append(prediction.bct_s)
    assert times[1] < times[0]


def test_expected_experts() -> None:
    assert DENSE.experts_hit(10) == 0
    assert SPARSE.experts_hit(1) == pytest.approx(4)
    assert SPARSE.experts_hit(10_000) == pytest.approx(32)
