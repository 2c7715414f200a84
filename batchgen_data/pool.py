"""How many engines a job gets, and what each one takes: one rule for `generate` and `batchgen run`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from batchgen_data.config import EngineConfig
from batchgen_data.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Actors of one `map_batches` stage.

    Attributes:
        num_actors: engines.
        num_gpus: GPUs Ray reserves for each; 0 for a CPU engine.
        num_cpus: CPUs Ray reserves for each.
        actors_per_node: engines on one machine.
    """

    num_actors: int
    num_gpus: float
    num_cpus: float
    actors_per_node: int

    def map_arguments(self, num_calls: int) -> dict[str, Any]:
        """Keyword arguments of `map_batches` for this pool, with `num_calls` calls at once per actor."""
        import ray.data

        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus or None,
            "compute": ray.data.ActorPoolStrategy(
                size=self.num_actors,
                max_concurrent_calls_per_actor=num_calls,
                max_tasks_in_flight_per_actor=2 * num_calls,
                enable_true_multi_threading=True,
            ),
        }


def plan_pool(
    config: EngineConfig,
    *,
    num_actors: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
) -> Pool:
    """Choose a pool for the Ray cluster of this process.

    Args:
        config: the engine's options.
        num_actors: None: one per GPU where engines use GPUs, else one per machine.
        num_cpus: None reserves no CPU: readers and writers need them, and an engine takes what it finds.
        num_gpus: None: one where the cluster has GPUs and the device allows it, else none.

    Raises:
        ConfigError: more GPUs than the cluster has (Ray would wait for them for ever), a numbered device
            where Ray assigns devices, or numbers that make no sense.
    """
    import ray

    gpus = float(ray.cluster_resources().get("GPU", 0))
    num_nodes = max(1, sum(1 for node in ray.nodes() if node["Alive"]))
    wants_gpu = config.device != "cpu"
    if num_gpus is None:
        num_gpus = 1 if wants_gpu and gpus >= 1 else 0
    if not isinstance(num_gpus, int | float) or num_gpus < 0:
        raise ConfigError(f"num_gpus must be 0 or more, not {num_gpus!r}")
    if num_gpus and ":" in config.device:
        raise ConfigError(f"device {config.device!r} names one GPU, but Ray assigns them; use device cuda")
    if num_actors is None:
        num_actors = max(1, int(gpus // num_gpus)) if num_gpus else num_nodes
    if not isinstance(num_actors, int) or isinstance(num_actors, bool) or num_actors < 1:
        raise ConfigError(f"num_actors must be a positive whole number, not {num_actors!r}")
    if num_actors * num_gpus > gpus:
        raise ConfigError(
            f"{num_actors} actors with {num_gpus:g} GPUs each need {num_actors * num_gpus:g} GPUs; "
            f"the cluster has {gpus:g}. Lower num_actors or num_gpus"
        )
    return Pool(
        num_actors=num_actors,
        num_gpus=num_gpus,
        num_cpus=0 if num_cpus is None else num_cpus,
        actors_per_node=math.ceil(num_actors / num_nodes),
    )
