"""A plan from sizes alone, where nothing was measured: safe, not the fastest. No torch here."""

from __future__ import annotations

import dataclasses

from batchgen_data.planner.plan import Budget, Plan
from batchgen_data.planner.search import does_not_fit
from batchgen_data.planner.sizes import ModelSizes

# Of a CPU's free memory: the rest belongs to the caller, to Ray's object store and to the file cache.
_SHARED_KV_FRACTION, _SHARED_FRACTION = 0.3, 0.7
_OWN_FRACTION = 0.9
# Where weights are streamed, room for so many tokens of each sequence, and no more than half of what is left.
_ROW_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What this process may take.

    Attributes:
        free_bytes: on the device.
        host_bytes: of the host tier.
        shared: the device's memory is the machine's own, as on a CPU.
    """

    free_bytes: int
    host_bytes: int = 0
    shared: bool = False


def budget_of(sizes: ModelSizes, memory: Memory, device_memory: int | None = None) -> Budget:
    """The budget that a plan for `sizes` may use; `device_memory` bytes of the device where that is given."""
    if device_memory is not None:
        return Budget(device_bytes=device_memory, host_bytes=memory.host_bytes)
    if not memory.shared:
        return Budget(device_bytes=int(memory.free_bytes * _OWN_FRACTION), host_bytes=memory.host_bytes)
    most = int(memory.free_bytes * _SHARED_FRACTION)
    left = max(0, memory.free_bytes - sizes.weights_bytes)
    wanted = sizes.weights_bytes + int(left * _SHARED_KV_FRACTION)
    default = Plan()
    wanted += sizes.pass_bytes(default.max_sequences, default.max_step_tokens)
    return Budget(device_bytes=min(most, wanted), host_bytes=memory.host_bytes)


def plan_by_rules(sizes: ModelSizes, memory: Memory, plan: Plan, *, page_tokens: int) -> Plan:
    """Return `plan`, its memory left open, where everything fits, else with streamed weights.

    Raises:
        PlanError: not even streamed.
    """
    budget = budget_of(sizes, memory)
    room = sizes.pass_bytes(plan.max_sequences, plan.max_step_tokens)
    one_row = min(sizes.context_tokens, _ROW_TOKENS) * sizes.kv_token_bytes
    if sizes.weights_bytes + room + one_row <= budget.device_bytes:
        return plan
    left = budget.device_bytes - room
    spare = left - sizes.least_weights_bytes
    least_kv = 2 * page_tokens * sizes.kv_token_bytes
    if spare < least_kv:
        raise does_not_fit(sizes, budget, page_tokens)
    kv_memory = max(least_kv, min(spare // 2, plan.max_sequences * _ROW_TOKENS * sizes.kv_token_bytes))
    return dataclasses.replace(plan, basis="rules", weights_memory=left - kv_memory, kv_memory=kv_memory)
