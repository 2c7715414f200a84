"""The stage in a pipeline of one's own: read Parquet, complete, filter, write.

python pipelines/complete_parquet.py IN OUT --model MODEL --prompt "Summarise: {{ text }}"
"""

from __future__ import annotations

import argparse

import ray
import ray.data
from ray.data.expressions import col

from batchgen_data import BatchGenLLM, SamplingParams


def main() -> None:
    """Complete every row of IN and write the rows that have a completion to OUT."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="IN", help="Parquet file or folder")
    parser.add_argument("output", metavar="OUT", help="folder for the results")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True, help="Jinja template over the columns")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    ray.init()  # the cluster that RAY_ADDRESS names, else this machine
    ds = ray.data.read_parquet(options.source)
    # A call takes a block: blocks of 32 rows give the calls below something to do.
    ds = ds.repartition(target_num_rows_per_block=32)
    ds = ds.map_batches(
        BatchGenLLM,
        fn_constructor_kwargs={
            "model": options.model,
            "prompt": options.prompt,
            "sampling": SamplingParams(max_tokens=options.max_tokens),
        },
        batch_format="pyarrow",
        batch_size=32,
        num_cpus=0,  # the engine takes the machine's CPUs; Ray's readers and writers need theirs reserved
        compute=ray.data.ActorPoolStrategy(
            size=1,
            max_concurrent_calls_per_actor=128,  # rows of the next calls fill in for those that finished
            enable_true_multi_threading=True,
        ),
    )
    ds = ds.filter(expr=col("generated_text").is_not_null())
    ds.write_parquet(options.output)
    print(ray.data.read_parquet(options.output).take(1))


if __name__ == "__main__":
    main()
