"""A job through a real Ray session, with a stand-in for the model."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.cloudpickle

from batchgen_data.errors import ConfigError, InputError, JobError
from batchgen_data.job.check import JobConfig
from batchgen_data.job.run import run_job
from batchgen_data.job.status import read_status
from batchgen_data.job.verify import verify_output
from batchgen_data.models.source import ModelSource
from batchgen_data.schema import Outcome, append_results

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class FakeStage:
    """Completes a prompt with the number of the call's rows; prompts that are words have effects."""

    def __init__(self, *, prompt_column: str, model: str, progress: Callable[..., Any], **_: Any) -> None:
        if model == "refused":
            raise ConfigError("the model has no chat template")
        if model == "dies":
            os._exit(1)
        self._column = prompt_column
        self._progress = progress

    def record(self) -> dict[str, Any]:
        return {"device": "fake"}

    def __call__(self, table: pa.Table) -> pa.Table:
        prompts = table.column(self._column).to_pylist()
        if "slow" in prompts:
            time.sleep(1)
        if "bug" in prompts:
            raise ZeroDivisionError("a bug")
        outcomes = [
            Outcome(finish_reason="stop", text=f"{p}!", token_ids=[1], num_input_tokens=1) for p in prompts
        ]
        self._progress("worker", {"rows_done": len(prompts)})
        return append_results(table, outcomes)


class LoggingStage(FakeStage):
    """Notes every prompt it is given in the folder that the prompt names; some have an effect once."""

    def __call__(self, table: pa.Table) -> pa.Table:
        prompts = table.column(self._column).to_pylist()
        folder = prompts[0].rpartition(" ")[2]
        with open(f"{folder}/log", "ab", buffering=0) as sink:
            sink.write("".join(f"{prompt}\n" for prompt in prompts).encode())
        for prompt in prompts:
            what = prompt.rpartition(" ")[0]
            if what in ("dies once", "fails once") and not os.path.exists(f"{folder}/{what}"):
                open(f"{folder}/{what}", "w").close()
                if what == "dies once":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(2)  # let the others finish
                raise JobError("not yet")
        return super().__call__(table)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    """One Ray session for the module: starting one takes seconds."""
    from batchgen_data.job.session import ray_session

    with ray_session():
        yield


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "batchgen_data.job.check.resolve_source",
        lambda model, revision=None, **_: ModelSource(kind="hub", name=model),
    )


def job(tmp_path: Path, **options: Any) -> JobConfig:
    given = {"model": "fake", "prompt_column": "prompt", "batch_size": 4, **options}
    return JobConfig(inputs=(str(tmp_path / "in"),), output=str(tmp_path / "out"), **given)


def test_order_types_and_schemas_survive_several_workers(tmp_path: Path) -> None:
    """Cases 7, 8, 19 and 65: the first rows take longest, and every file has its own columns."""
    (tmp_path / "in").mkdir()
    tables = []
    for idx, kind in enumerate((pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))):
        prompts = ["slow", *(f"{idx}-{n}" for n in range(30))]
        columns: dict[str, pa.Array] = {
            "prompt": pa.array(prompts).cast(kind) if idx < 2 else pa.array(prompts).dictionary_encode(),
            "at": pa.array([None, *range(30)], pa.timestamp("ns", "Europe/Zurich")),
            f"only{idx}": pa.array([None, True, *[False] * 29]),
        }
        tables.append(pa.table(columns).replace_schema_metadata({"file": str(idx)}))
        pq.write_table(tables[-1], tmp_path / f"in/{idx}.parquet")
    summary = run_job(job(tmp_path, num_actors=2), stage_class=FakeStage)
    assert (summary.num_rows, summary.num_ok) == (93, 93)
    assert summary.generating_s > 0
    for idx, table in enumerate(tables):
        back = pq.read_table(tmp_path / f"out/data/{idx}-00000.parquet")
        inputs = back.select(table.column_names)
        assert inputs.equals(table)
        assert back.schema.metadata[b"file"] == str(idx).encode()
        assert back.column("generated_text").to_pylist() == [
            f"{p}!" for p in table.column("prompt").to_pylist()
        ]


@pytest.mark.parametrize(
    "model, prompt, kind, message",
    [
        ("refused", "x", ConfigError, "^the model has no chat template"),
        ("fake", "bug", JobError, "^a worker failed: ZeroDivisionError: a bug"),
        ("dies", "x", JobError, "worker processes died 4 times"),
    ],
)
def test_what_fails_in_a_worker_keeps_its_kind_and_leaves_nothing(
    tmp_path: Path, model: str, prompt: str, kind: type[Exception], message: str
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"prompt": [prompt, prompt]}), tmp_path / "in/a.parquet")
    with pytest.raises(kind, match=message):
        run_job(job(tmp_path, model=model), stage_class=FakeStage)
    assert not (tmp_path / "out").exists()


def test_a_worker_that_dies_costs_only_its_rows_in_flight(tmp_path: Path) -> None:
    """Case 5: the other worker carries on, rows on disk are not repeated, each row comes out once."""
    (tmp_path / "in").mkdir()
    prompts = [f"{n} {tmp_path}" for n in range(120)]
    prompts[60] = f"dies once {tmp_path}"
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in/a.parquet")
    summary = run_job(job(tmp_path, num_actors=2), stage_class=LoggingStage)
    assert (summary.num_rows, summary.num_ok) == (120, 120)
    table = pq.read_table(tmp_path / "out/data")
    assert table.column("prompt").to_pylist() == prompts
    generated = (tmp_path / "log").read_text().splitlines()
    assert set(generated) == set(prompts)
    # At most what one worker had in flight: its calls of 4 rows each.
    assert len(generated) - 120 <= 4 * 64
    assert verify_output(str(tmp_path / "out")).problems == []


class HostileStage(FakeStage):
    """Some prompts end the process, or never end."""

    def __call__(self, table: pa.Table) -> pa.Table:
        prompts = table.column(self._column).to_pylist()
        if "kills" in prompts:
            ctypes.string_at(0)  # a crash in native code
        if "hangs" in prompts:
            time.sleep(3600)
        return super().__call__(table)


def test_rows_that_kill_or_hang_a_worker_cost_no_other_row(tmp_path: Path) -> None:
    """Promise 6 and case 58: found by restarts, given up by name; the job ends."""
    (tmp_path / "in").mkdir()
    prompts = [str(n) for n in range(60)]
    prompts[17], prompts[41] = "kills", "hangs"
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in/a.parquet")
    summary = run_job(job(tmp_path, stall_timeout_s=2.0), stage_class=HostileStage)
    assert (summary.num_rows, summary.num_ok, summary.num_failed) == (60, 58, 2)
    failed = pq.read_table(tmp_path / "out/errors")
    assert failed.column("prompt").to_pylist() == ["kills", "hangs"]
    assert set(failed.column("error_code").to_pylist()) == {"worker_died"}
    assert verify_output(str(tmp_path / "out")).problems == []


def test_an_unfinished_job_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    """Case 56: most rows are done, spread unevenly; what is left runs, and nothing else."""
    (tmp_path / "in").mkdir()
    prompts = [f"{n} {tmp_path}" for n in range(80)]
    prompts[37] = f"fails once {tmp_path}"
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in/a.parquet")
    with pytest.raises(JobError, match="not yet"):
        run_job(job(tmp_path, engine={"max_sequences": 8}), stage_class=LoggingStage)
    status = read_status(str(tmp_path / "out"))
    assert status.num_journaled >= 36
    before = (tmp_path / "log").read_text().splitlines()
    summary = run_job(job(tmp_path), stage_class=LoggingStage)
    assert (summary.num_rows, summary.run_rows) == (80, 80 - status.num_journaled)
    again = (tmp_path / "log").read_text().splitlines()[len(before) :]
    assert len(again) == 80 - status.num_journaled
    assert verify_output(str(tmp_path / "out")).problems == []


def test_a_file_that_vanishes_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/a.parquet"
    pq.write_table(pa.table({"prompt": ["x"]}), path)
    with pytest.raises(InputError, match=r"a\.parquet cannot be read"):
        run_job(job(tmp_path), stage_class=FakeStage, on_checked=lambda _: path.unlink())


SLOW_JOB = """
    import sys, time
    from batchgen_data import cli
    from batchgen_data.job import check, run
    from batchgen_data.models.source import ModelSource
    from batchgen_data.schema import Outcome, append_results

    class Slow:
        def __init__(self, **_):
            self.num_calls = 0
        def record(self):
            return {}
        def __call__(self, table):
            if "slow" in table.column("prompt").to_pylist():
                open("reached", "w").close()
                time.sleep(600)
            outcome = Outcome(finish_reason="stop", text="x")
            return append_results(table, [outcome] * table.num_rows)

    run_job = run.run_job
    run.run_job = lambda config, **options: run_job(config, stage_class=Slow, **options)
    check.resolve_source = lambda model, *_, **__: ModelSource(kind="hub", name=model)
    arguments = "run in -o out -m x --prompt-column prompt --batch-size 1"
    sys.exit(cli.main(arguments.split()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_run_without_half_files_or_orphans_and_it_goes_on(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 55 and promise 15."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"prompt": ["fast"]}), tmp_path / "in/a.parquet")
    pq.write_table(pa.table({"prompt": ["fast", "slow"]}), tmp_path / "in/b.parquet")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW_JOB)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    published = tmp_path / "out/data/a-00000.parquet"
    deadline_s = time.monotonic() + 90
    while not (published.exists() and (tmp_path / "reached").exists()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "the run did not get going"
        time.sleep(0.1)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    workers = [member for member in family if "JobStage" in " ".join([member.name(), *member.cmdline()])]
    assert workers
    # As a terminal does for Ctrl-C: to every process of the group.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    stopped_s = time.monotonic()
    printed, errors = process.communicate(timeout=60)
    assert time.monotonic() - stopped_s < 20
    lines = errors.splitlines()
    assert lines[0] == "3 rows in 2 files; starting the workers"
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, errors
        assert lines[-1].startswith("error: interrupted; finished rows are kept")
        noise = [line for line in lines[1:-1] if "rows" not in line]
        assert noise == []
        assert read_status(str(tmp_path / "out")).last_status == "interrupted"
    assert printed == ""
    visible = sorted(p.name for p in (tmp_path / "out").rglob("*.parquet"))
    assert visible == ["a-00000.parquet"]
    assert pq.read_table(published).num_rows == 1
    # After a kill Ray's own agents notice only after a while that their driver is gone; its workers do soon.
    watched = workers if number == signal.SIGKILL else family
    _, alive = psutil.wait_procs(watched, timeout=20)
    assert alive == []

    monkeypatch.chdir(tmp_path)
    summary = run_job(
        JobConfig(inputs=("in",), output="out", model="x", prompt_column="prompt"), stage_class=FakeStage
    )
    assert (summary.num_rows, summary.run_rows) == (3, 1)
    texts = pq.read_table("out/data/b-00000.parquet").column("generated_text").to_pylist()
    assert texts == ["x", "slow!"]
    assert verify_output("out").problems == []
