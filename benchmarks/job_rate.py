"""What a job costs beside the model: rows through Ray, journal and commit, answered at once by a stand-in.

    python benchmarks/job_rate.py [--rows 10000,100000,1000000]

Each size runs in a process of its own and is verified afterwards. Prints rows/s (start-up excluded) and the
driver's peak memory; writes bench-results/job_rate.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from workload import RESULTS, machine

from batchgen_data.schema import Outcome, append_results


class AnswersAtOnce:
    """Takes the place of `BatchGenLLM`."""

    def __init__(self, **_: Any) -> None:
        self._outcome = Outcome(finish_reason="stop", text="an answer", token_ids=[1, 2], num_input_tokens=3)

    def record(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {}

    def __call__(self, table: pa.Table) -> pa.Table:
        return append_results(table, [self._outcome] * table.num_rows)


def run(folder: str) -> dict[str, Any]:
    """The job of a folder, in this process."""
    import ray.cloudpickle

    from batchgen_data.job import check
    from batchgen_data.job.check import JobConfig
    from batchgen_data.job.run import run_job
    from batchgen_data.job.verify import verify_output
    from batchgen_data.models.source import ModelSource

    ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    check.resolve_source = lambda model, *_, **__: ModelSource(kind="hub", name=model)
    job = JobConfig(
        inputs=(f"{folder}/in.parquet",), output=f"{folder}/out", model="none", prompt_column="prompt"
    )
    summary = run_job(job, stage_class=AnswersAtOnce)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert summary.num_ok == summary.num_rows
    assert verify_output(f"{folder}/out").problems == []
    return {
        "rows": summary.num_rows,
        "seconds": summary.generating_s,
        "rows_s": summary.num_rows / summary.generating_s,
        "driver_peak_bytes": peak_bytes,
    }


def main() -> None:
    """Run each size and print a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="10000,100000,1000000")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(run(options.child)))
        return
    results = []
    for num_rows in map(int, options.rows.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            prompts = pa.table({"prompt": [f"row {n}" for n in range(num_rows)]})
            pq.write_table(prompts, f"{folder}/in.parquet")
            del prompts
            done = subprocess.run(
                [sys.executable, __file__, "--child", folder], stdout=subprocess.PIPE, text=True, check=True
            )
        results.append(json.loads(done.stdout.splitlines()[-1]))
        last = results[-1]
        print(
            f"{last['rows']:9} rows in {last['seconds']:6.1f} s: {last['rows_s']:7.0f} rows/s, driver's peak "
            f"{last['driver_peak_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    RESULTS.mkdir(exist_ok=True)
    report = {"machine": machine(), "results": results}
    Path(RESULTS / "job_rate.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
