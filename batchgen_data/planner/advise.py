"""From a model and a machine to a plan: sizes, a profile (kept, or measured now), the search."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from batchgen_data.config import EngineConfig, parse_bytes
from batchgen_data.errors import PlanError
from batchgen_data.models.load import read_config
from batchgen_data.models.source import ModelSource, local_folder
from batchgen_data.planner.cache import load_profile, only_one, profile_path, save_profile
from batchgen_data.planner.cost import CostModel, Profile
from batchgen_data.planner.meta import model_sizes
from batchgen_data.planner.plan import Budget, Plan, Prediction, given_fields
from batchgen_data.planner.profile import device_name, profile_model
from batchgen_data.planner.rules import Memory, budget_of, plan_by_rules
from batchgen_data.planner.search import (
    Choice,
    Problem,
    does_not_fit,
    kv_capacity_tokens,
    predictor,
    search,
    usual_pass,
    what_helps,
)
from batchgen_data.planner.sizes import ModelSizes
from batchgen_data.planner.workload import PassShape, Workload, passes
from batchgen_data.runtime.resources import free_memory_bytes

# Lengths assumed where no input tells them.
ASSUMED = Workload.uniform(512, 256, 256)
# Checkpoints of less than one in so many bytes of what is free need no closer look: stored numbers have two
# bytes or more, running ones at most four, and three times as much is left for KV pages and passes.
_SMALL_SHARE = 8
# A searched plan takes the place of the defaults at start-up only where it should be this much faster.
_LEAST_GAIN = 1.05
# Options with which the caller has shared out the memory, cut passes into sub-batches, set the rows of one.
_MEMORY = ("weights_memory", "kv_residence", "kv_memory", "kv_memory_fraction", "host_memory", "host_path")
_SUB_BATCHES = ("attention_sub_batch", "moe_batch_tokens", "yield_at")
_ROWS = ("max_sequences", "max_step_tokens")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a plan is for.

    Attributes:
        source: the model.
        config: engine options; those set are kept.
        device: where to run.
        dtype: the running type; None takes the checkpoint's.
        num_threads: CPU threads.
        device_memory: bytes of the device tier; None takes what is free.
        host_memory: bytes of the host tier; None: half of what is free beside the device tier.
        part: of the machine's memory that belongs to this process.
    """

    source: ModelSource
    config: EngineConfig
    device: torch.device
    dtype: torch.dtype | None
    num_threads: int
    device_memory: int | None = None
    host_memory: int | None = None
    part: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A choice with what it was made from."""

    choice: Choice
    problem: Problem
    usual: PassShape
    predicted_defaults: Prediction | None

    def explain(self) -> str:
        """The graph of a layer of each kind in a usual pass, and its critical path."""
        problem = self.problem
        cost = CostModel(
            problem.sizes, problem.profile, problem.budget, self.choice.best, problem.page_tokens
        )
        parts = []
        for layer in problem.sizes.layers:
            graph = cost.layer_graph(layer, self.usual)
            window = f", window of {layer.window} tokens" if layer.window else ""
            parts.append(
                f"{layer.kind} layer, one of {layer.count}{window}: {graph.seconds * 1e3:.2f} ms with "
                f"{self.usual.decoding:.0f} sequences decoding at {self.usual.context:.0f} tokens"
                + (f" and {self.usual.prefill_tokens:.0f} prompt tokens" if self.usual.prefill_tokens else "")
                + f"\n{graph.draw()}\ncritical path: {' > '.join(graph.critical_path)}"
            )
        return "\n\n".join(parts)


def advise(
    target: Target, workload: Workload | None = None, *, notify: Callable[[str], None] = lambda _: None
) -> Advice:
    """Find the fastest plan that fits, measuring the model on the device where no profile is kept.

    Args:
        target: what the plan is for.
        workload: the rows; None assumes some.
        notify: called with what is being measured.

    Raises:
        ConfigError: as `models.load.read_config`.
        PlanError: nothing fits; found before anything is measured where sizes tell.
    """
    folder, config, dtype, sizes = _sizes(target)
    workload = (workload or ASSUMED).within(sizes.context_tokens)
    budget = _budget(target, sizes)
    if sizes.least_weights_bytes > budget.device_bytes:
        raise does_not_fit(sizes, budget, target.config.page_tokens)
    problem = Problem(
        sizes=sizes,
        profile=_profile(target, folder, config, dtype, sizes, notify),
        budget=budget,
        workload=workload,
        given=_given(target.config),
        page_tokens=target.config.page_tokens,
    )
    choice = what_helps(problem, search(problem))
    counts = passes(
        workload,
        max_sequences=choice.best.max_sequences,
        max_step_tokens=choice.best.max_step_tokens,
        capacity_tokens=kv_capacity_tokens(problem, choice.best),
    )
    return Advice(
        choice=choice, problem=problem, usual=usual_pass(counts), predicted_defaults=_defaults(problem)
    )


def plan_at_start(target: Target) -> Plan:
    """The plan of an engine; what the caller set stays.

    Where the caller shared out the memory there is nothing to plan. Where all fits nothing is measured: with
    a profile that is kept the plan is searched, else the defaults stay. Where weights are small beside what
    is free this only looks at file sizes. Where they do not fit the model is measured, once.

    Raises:
        ConfigError: as `models.load.read_config`.
        PlanError: the model runs in no way.
    """
    given = _given(target.config)
    unplanned = replace(Plan(), **given)
    if any(getattr(target.config, name) != getattr(EngineConfig(), name) for name in _MEMORY):
        return replace(unplanned, basis="given")
    folder = local_folder(target.source)
    _, config, _ = read_config(target.source, target.config.max_context_tokens)
    dtype = target.dtype or config.dtype or torch.float32
    profile = load_profile(_profile_path(target, folder, dtype))
    memory = _memory(target)
    file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if profile is None and _SMALL_SHARE * file_bytes < memory.free_bytes:
        return unplanned
    folder, config, dtype, sizes = _sizes(target)
    by_rules = plan_by_rules(sizes, memory, unplanned, page_tokens=target.config.page_tokens)
    if any(name in given for name in _SUB_BATCHES):
        return by_rules
    if profile is None:
        if by_rules.basis == "defaults":
            return by_rules
        logger.info("%s does not fit in memory: measuring it, to choose what stays", sizes.architecture)
        try:
            profile = _profile(target, local_folder(target.source), config, dtype, sizes, logger.info)
        except PlanError as error:
            logger.warning("no plan could be measured: %s", error)
            return by_rules
    return _searched(target, sizes, profile, by_rules)


def _searched(target: Target, sizes: ModelSizes, profile: Profile, by_rules: Plan) -> Plan:
    problem = Problem(
        sizes=sizes,
        profile=profile,
        budget=_budget(target, sizes),
        workload=ASSUMED.within(sizes.context_tokens),
        given=_given(target.config),
        page_tokens=target.config.page_tokens,
    )
    try:
        best = search(problem).best
    except PlanError:
        return by_rules
    usual = _defaults(problem)
    assert best.prediction is not None  # made by the search
    if by_rules.basis == "defaults" and usual is not None:
        if usual.bct_s < _LEAST_GAIN * best.prediction.bct_s:
            return by_rules
        if best.weights_memory is None and best.kv_residence == "device":
            # As much for KV pages as without a plan.
            return replace(best, kv_memory=None)
    return best


def _profile(
    target: Target,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    sizes: ModelSizes,
    notify: Callable[[str], None],
) -> Profile:
    """The profile that is kept, or one made now and kept; processes that want the same one wait for it."""
    path = _profile_path(target, folder, dtype)
    with only_one(path):
        profile = load_profile(path)
        if profile is None:
            profile = profile_model(
                config,
                sizes,
                device=target.device,
                dtype=dtype,
                num_threads=target.num_threads,
                # With the weights of a hub model too: the disk they are on is measured.
                folder=local_folder(target.source),
                notify=notify,
            )
            save_profile(profile, path)
    return profile


def _profile_path(target: Target, folder: Path, dtype: torch.dtype) -> Path:
    return profile_path(folder, device_name(target.device), str(dtype), target.num_threads)


def _defaults(problem: Problem) -> Prediction | None:
    """What the engine's defaults should give; None where they do not fit."""
    kv_memory = problem.budget.device_bytes - problem.sizes.weights_bytes
    if kv_memory < 2 * problem.page_tokens * problem.sizes.kv_token_bytes:
        return None
    rows = {name: problem.given[name] for name in _ROWS if name in problem.given}
    return predictor(problem)(Plan(kv_memory=kv_memory, **rows))


def _sizes(target: Target) -> tuple[Any, Any, torch.dtype, ModelSizes]:
    folder, config, context_tokens = read_config(target.source, target.config.max_context_tokens)
    dtype = target.dtype or config.dtype or torch.float32
    return folder, config, dtype, model_sizes(config, dtype, context_tokens)


def _memory(target: Target) -> Memory:
    free = free_memory_bytes(target.device)
    on_cpu = target.device.type == "cpu"
    host = 0 if on_cpu else free_memory_bytes(torch.device("cpu")) // 2
    if on_cpu and target.device_memory is not None:
        # Memory beyond the budget is the host tier.
        host = max(0, free - target.device_memory) // 2
    host_bytes = int(host * target.part) if target.host_memory is None else target.host_memory
    return Memory(free_bytes=int(free * target.part), host_bytes=host_bytes, shared=on_cpu)


def _budget(target: Target, sizes: ModelSizes) -> Budget:
    return budget_of(sizes, _memory(target), target.device_memory)


def _given(config: EngineConfig) -> dict[str, Any]:
    """What the caller set, sizes as numbers."""
    return {
        name: parse_bytes(value, name) if name.endswith("_memory") else value
        for name, value in given_fields(config).items()
    }
