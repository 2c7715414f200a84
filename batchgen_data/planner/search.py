"""The plan search: every choice that fits is predicted, and the fastest wins. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from batchgen_data.errors import PlanError
from batchgen_data.planner.cost import CostModel, Profile
from batchgen_data.planner.plan import Budget, Plan, Prediction, as_size
from batchgen_data.planner.sizes import ModelSizes
from batchgen_data.planner.workload import PassShape, Workload, passes

_SEQUENCES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_STEP_TOKENS = (64, 256, 512, 1024, 4096)
_SUB_BATCHES = (1, 4, 16, 64, 256)
_MOE_TOKENS = (None, 256, 1024)
# Predictions nearer than this are equal: the simpler choice wins.
TIE = 0.02
# Nearer than this they are the same choice: what differs makes no difference.
_SAME = 0.001
# With fewer pages than this no row can run.
_LEAST_PAGES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Help:
    """What the same search gives with more of something."""

    what: str
    bct_s: float
    times_sooner: float


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of a search: the plan, the next best, and what would help most, best first."""

    best: Plan
    runner_up: Plan | None
    helps: tuple[Help, ...] = ()
    num_considered: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a search works on.

    Attributes:
        sizes: the model's parts.
        profile: its measured costs.
        budget: memory of the tiers.
        workload: the rows.
        given: fields of the plan that the caller set; they are not searched.
        page_tokens: tokens of a KV page.
    """

    sizes: ModelSizes
    profile: Profile
    budget: Budget
    workload: Workload
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    page_tokens: int = 64


def search(problem: Problem) -> Choice:
    """Find the fastest plan that fits.

    Raises:
        PlanError: nothing fits; the message says how many bytes are needed, how many there are, and what
            to change.
    """
    predict = predictor(problem)
    ranked: list[Plan] = []
    num_considered = 0
    # Those with room for the most rows first: they are often the fastest, and rule out the others early.
    for plan in sorted(candidates(problem), key=lambda plan: -plan.max_sequences):
        num_considered += 1
        enough_s = (1 + TIE) * _second_s([_bct_s(plan) for plan in ranked])
        prediction = predict(plan, enough_s)
        if prediction is not None:
            ranked.append(dataclasses.replace(plan, prediction=prediction))
    if not ranked:
        raise does_not_fit(problem.sizes, problem.budget, problem.page_tokens, problem.given)
    ranked.sort(key=_bct_s)
    fastest_s = _bct_s(ranked[0])
    best = min((plan for plan in ranked if _bct_s(plan) <= fastest_s * (1 + TIE)), key=_effort)
    slower = (plan for plan in ranked if _bct_s(plan) > _bct_s(best) * (1 + _SAME))
    return Choice(best, next(slower, None), num_considered=num_considered)


def what_helps(problem: Problem, choice: Choice) -> Choice:
    """Add to a choice what twice the memory or bandwidth would give, best first."""
    budget, profile, best = problem.budget, problem.profile, choice.best
    changes: dict[str, dict[str, Any]] = {
        "twice the device memory": {"device_bytes": 2 * budget.device_bytes},
    }
    if budget.host_bytes:
        changes["twice the host memory"] = {"host_bytes": 2 * budget.host_bytes}
    if best.weights_memory is not None:
        disk = budget.disk_bytes_s or profile.disk_bytes_s
        changes["twice the disk bandwidth"] = {"disk_bytes_s": 2 * disk}
    if best.kv_residence == "host":
        copy = budget.copy_bytes_s or profile.copy_bytes_s
        changes["twice the bandwidth between device and host"] = {"copy_bytes_s": 2 * copy}
    now_s = _bct_s(choice.best)
    helps = []
    for what, change in changes.items():
        more = dataclasses.replace(problem, budget=dataclasses.replace(budget, **change))
        bct_s = _bct_s(search(more).best)
        helps.append(Help(what, bct_s, now_s / bct_s if bct_s else 1.0))
    helps.sort(key=lambda help: help.bct_s)
    return dataclasses.replace(choice, helps=tuple(helps))


class Predict(Protocol):
    """Predicts the workload under a plan."""

    def __call__(self, plan: Plan, enough_s: float = math.inf) -> Prediction | None:
        """Return the prediction, or None where the workload takes longer than `enough_s`."""


def predictor(problem: Problem) -> Predict:
    """Return a function that predicts plans for one problem; it remembers what plans share."""
    sizes, workload = problem.sizes, problem.workload
    known: dict[tuple[int, int, float], dict[PassShape, float]] = {}

    def predict(plan: Plan, enough_s: float = math.inf) -> Prediction | None:
        # Room for more than the rows at once makes no difference.
        capacity = min(kv_capacity_tokens(problem, plan), plan.max_sequences * workload.longest_tokens)
        key = plan.max_sequences, plan.max_step_tokens, capacity
        if key not in known:
            known[key] = passes(
                workload,
                max_sequences=plan.max_sequences,
                max_step_tokens=plan.max_step_tokens,
                capacity_tokens=capacity,
            )
        counts = known[key]
        cost = CostModel(sizes, problem.profile, problem.budget, plan, problem.page_tokens)
        bct_s = 0.0
        for shape in sorted(counts, key=lambda shape: -counts[shape] * shape.num_tokens):
            bct_s += counts[shape] * cost.pass_s(shape)
            if bct_s > enough_s:
                return None
        usual = usual_pass(counts)
        device_bytes, host_bytes = plan_bytes(problem, plan)
        return Prediction(
            bct_s=bct_s,
            tokens_per_s=workload.generated_tokens / bct_s if bct_s else 0.0,
            step_s=cost.pass_s(usual),
            step_sequences=round(usual.num_sequences),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )

    return predict


def usual_pass(counts: Mapping[PassShape, float]) -> PassShape:
    """The pass in which most tokens are decoded; of a workload that decodes nothing, the commonest."""
    return max(counts, key=lambda shape: (counts[shape] * shape.decoding, counts[shape]))


def candidates(problem: Problem) -> Iterator[Plan]:
    """Every plan of the grid that fits; what the caller set is kept as it is."""
    for max_sequences in _values(problem, "max_sequences", _sequence_grid(problem.workload.num_rows)):
        for max_step_tokens in _values(problem, "max_step_tokens", _STEP_TOKENS):
            if max_step_tokens < max_sequences:
                continue
            base = Plan(basis="profile", max_sequences=max_sequences, max_step_tokens=max_step_tokens)
            for residence in _values(problem, "kv_residence", ("device", "host")):
                placed = dataclasses.replace(base, kv_residence=residence)
                for plan, rows in _sub_batch_plans(problem, placed):
                    yield from _filled(problem, plan, rows)


def _filled(problem: Problem, plan: Plan, rows: int | None) -> Iterator[Plan]:
    """The plan with memory shared out, weights all on the device or streamed."""
    for streamed in _streaming(problem):
        filled = _with_memory(problem, plan, streamed, rows)
        if filled is None:
            continue
        yield filled
        if not streamed and kv_capacity_tokens(problem, filled) >= _wanted_tokens(problem, plan):
            # All rows have room: streaming weights would free memory that nobody needs.
            return


def _wanted_tokens(problem: Problem, plan: Plan) -> float:
    pages = _row_pages(problem, problem.workload.mean_tokens)
    return plan.max_sequences * pages * problem.page_tokens


def _streaming(problem: Problem) -> tuple[bool, ...]:
    """Whether weights may be all on the device, streamed, or either."""
    given = problem.given.get("weights_memory")
    return (False, True) if given is None else (given < problem.sizes.weights_bytes,)


def _sub_batch_plans(problem: Problem, base: Plan) -> Iterator[tuple[Plan, int | None]]:
    """Ways to run a pass in sub-batches or as one unit, and the rows that the KV staging is to hold.

    With all KV on the device sub-batches only cost time: they are not tried unless the caller asks.
    """
    sizes, given = problem.sizes, problem.given
    on_host = base.kv_residence == "host"
    asked = "attention_sub_batch" in given or "moe_batch_tokens" in given
    grid = _sub_batch_grid(base.max_sequences) if on_host else (None,)
    for rows in _values(problem, "attention_sub_batch", grid):
        for yield_at in _values(problem, "yield_at", _yield_points(sizes, on_host, asked)):
            points = sizes.is_sparse or yield_at is not None
            # Without a place to combine the staging alone sets the sub-batches.
            sub_batch = rows if points or "attention_sub_batch" in given else None
            moe_grid = (
                [tokens for tokens in _MOE_TOKENS if tokens is None or tokens < base.max_step_tokens]
                if sizes.is_sparse and on_host
                else [None]
            )
            for moe_tokens in _values(problem, "moe_batch_tokens", tuple(moe_grid)):
                plan = dataclasses.replace(
                    base, attention_sub_batch=sub_batch, moe_batch_tokens=moe_tokens, yield_at=yield_at
                )
                yield plan, rows


def _yield_points(sizes: ModelSizes, on_host: bool, asked: bool) -> tuple[tuple[str, ...] | None, ...]:
    """The sparse blocks (None), or every feed-forward block, where that is more and sub-batches are many."""
    every = tuple(dict.fromkeys(layer.feed_forward for layer in sizes.layers))
    if not (on_host or asked) or "" in every or all(layer.num_experts for layer in sizes.layers):
        return (None,)
    return (every,) if asked and not sizes.is_sparse else (None, every)


def kv_capacity_tokens(problem: Problem, plan: Plan) -> int:
    """Tokens whose keys and values have room under a plan."""
    place = plan.host_memory if plan.kv_residence == "host" else plan.kv_memory
    page_bytes = problem.page_tokens * problem.sizes.kv_token_bytes
    return (place or 0) // page_bytes * problem.page_tokens


def plan_bytes(problem: Problem, plan: Plan) -> tuple[int, int]:
    """Bytes of the device tier and of the host tier that a plan takes."""
    sizes = problem.sizes
    weights = sizes.weights_bytes if plan.weights_memory is None else plan.weights_memory
    room = _pass_bytes(sizes, plan)
    host = (plan.host_memory or 0) if plan.kv_residence == "host" else 0
    return min(weights, sizes.weights_bytes) + (plan.kv_memory or 0) + room, host


def does_not_fit(
    sizes: ModelSizes, budget: Budget, page_tokens: int, given: Mapping[str, Any] | None = None
) -> PlanError:
    """The error of a model that runs in no way, with the bytes it needs and what to change."""
    kv = _LEAST_PAGES * page_tokens * sizes.kv_token_bytes
    room = sizes.pass_bytes(1, _STEP_TOKENS[0])
    least = sizes.least_weights_bytes + kv + room
    if least > budget.device_bytes:
        return PlanError(
            f"{sizes.architecture} does not fit: with its weights streamed it needs {least:,} bytes of "
            f"device memory (embedding and head {sizes.other_bytes:,}, weights on their way "
            f"{sizes.least_weights_bytes - sizes.other_bytes:,}, KV pages {kv:,}, a pass {room:,}), and "
            f"there are {budget.device_bytes:,}; give at least {as_size(least)}, or use a smaller dtype"
        )
    shown = ", ".join(f"{name}={value}" for name, value in (given or {}).items()) or "no option"
    return PlanError(
        f"no plan for {sizes.architecture} fits {budget.device_bytes:,} bytes of device memory and "
        f"{budget.host_bytes:,} of host memory with {shown}: the model alone would run in {least:,}; "
        "change the options set, or give more memory"
    )


def _with_memory(problem: Problem, plan: Plan, streamed: bool, staged_rows: int | None) -> Plan | None:
    """Share out the memory of the tiers; None where the plan does not fit."""
    sizes, budget, given = problem.sizes, problem.budget, problem.given
    left = budget.device_bytes - _pass_bytes(sizes, plan)
    page_bytes = problem.page_tokens * sizes.kv_token_bytes
    host_memory = None
    if plan.kv_residence == "host":
        # More than all rows at their longest is never used.
        most = plan.max_sequences * _row_pages(problem, sizes.context_tokens) * page_bytes
        host_memory = given.get("host_memory", min(budget.host_bytes, most))
        if host_memory < _LEAST_PAGES * page_bytes or host_memory > budget.host_bytes:
            return None
        kv_wanted = given.get("kv_memory", _staging_bytes(problem, staged_rows or 1))
        kv_least = kv_wanted
    else:
        pages = _row_pages(problem, problem.workload.mean_tokens) * plan.max_sequences
        longest = _row_pages(problem, min(problem.workload.longest_tokens, sizes.context_tokens))
        kv_least = given.get("kv_memory", max(_LEAST_PAGES, longest) * page_bytes)
        kv_wanted = given.get("kv_memory", max(pages * page_bytes, kv_least))
    if streamed:
        weights = given.get("weights_memory")
        if weights is None:
            # Rows at once come first: each pass over the weights serves all of them.
            weights = max(sizes.least_weights_bytes, min(left - kv_wanted, sizes.weights_bytes - 1))
        if weights < sizes.least_weights_bytes or left - weights < kv_least:
            return None
        kv_memory = kv_wanted if left - weights >= kv_wanted else left - weights
        return dataclasses.replace(plan, weights_memory=weights, kv_memory=kv_memory, host_memory=host_memory)
    kv_room = left - sizes.weights_bytes
    if kv_room < kv_least:
        return None
    # All that is left, so that rows longer than those known fit as well.
    kv_memory = kv_wanted if plan.kv_residence == "host" else given.get("kv_memory", kv_room)
    return dataclasses.replace(plan, kv_memory=kv_memory, host_memory=host_memory)


def _staging_bytes(problem: Problem, staged_rows: int) -> int:
    """Two halves, each of one layer's pages of a sub-batch, or of the longest row."""
    pages = staged_rows * _row_pages(problem, problem.workload.mean_tokens)
    longest = _row_pages(problem, min(problem.workload.longest_tokens, problem.sizes.context_tokens))
    widest = problem.page_tokens * problem.sizes.widest_kv_token_bytes
    return 2 * max(pages, longest, _LEAST_PAGES) * widest


def _row_pages(problem: Problem, num_tokens: float) -> int:
    # One page more: a sequence holds the page it is about to fill.
    return int(num_tokens // problem.page_tokens) + 1


def _pass_bytes(sizes: ModelSizes, plan: Plan) -> int:
    return sizes.pass_bytes(plan.max_sequences, min(plan.max_step_tokens, plan.moe_batch_tokens or 1 << 62))


def _sequence_grid(num_rows: int) -> tuple[int, ...]:
    """No more sequences than the next step above the rows there are."""
    enough = next((number for number in _SEQUENCES if number >= num_rows), _SEQUENCES[-1])
    return tuple(number for number in _SEQUENCES if number <= enough)


def _sub_batch_grid(max_sequences: int) -> tuple[int, ...]:
    return tuple(number for number in _SUB_BATCHES if number <= max_sequences)


def _values(problem: Problem, name: str, grid: tuple[Any, ...]) -> tuple[Any, ...]:
    return (problem.given[name],) if name in problem.given else grid


def _second_s(times: list[float]) -> float:
    """The best time beyond a tie with the fastest: what is slower is neither the choice nor the runner-up."""
    fastest_s = min(times, default=math.inf)
    return min((time for time in times if time > fastest_s * (1 + TIE)), default=math.inf)


def _bct_s(plan: Plan) -> float:
    assert plan.prediction is not None  # made by the search
    return plan.prediction.bct_s


def _effort(plan: Plan) -> tuple[Any, ...]:
    """What makes one of two equally fast plans the simpler one."""
    default = Plan()
    return (
        plan.weights_memory is not None,
        plan.kv_residence != "device",
        plan.moe_batch_tokens is not None,
        plan.yield_at is not None,
        abs(plan.max_sequences - default.max_sequences),
        abs(plan.max_step_tokens - default.max_step_tokens),
        plan.attention_sub_batch or 0,
        _bct_s(plan),
    )
