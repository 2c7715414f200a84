"""A job that is run again: finished, stopped, changed, replaced, with failed rows; without Ray."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_data.errors import CommitError, ConfigError, JobError, JobLockedError, ResumeMismatchError
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.output import check_output, open_output
from batchgen_data.job.shards import as_ranges, choose_shard_rows, plan_shards, without
from batchgen_data.job.status import read_status
from batchgen_data.job.verify import verify_output
from batchgen_data.sampling import SamplingParams
from plain_job import PlainJob, StepFiles, write_inputs

RIGHT = {"lost": 0, "doubled": 0, "invented": 0, "wrong": 0}


@pytest.fixture
def job(tmp_path: Path) -> PlainJob:
    write_inputs(tmp_path / "in", [5, 0, 4])
    return PlainJob(inputs=tmp_path / "in", output=tmp_path / "out", log=tmp_path / "log")


class Stop(JobError):
    """Ends a run at once: our own errors are not tried again."""


def stop_after(job: PlainJob, num_items: int) -> None:
    """Run so many items, then stop as an error would."""
    checked = job.checked()

    class Stopping(PlainJob):
        def generate(self, table: pa.Table) -> pa.Table:
            nonlocal num_items
            if not num_items:
                raise Stop
            num_items -= 1
            return super().generate(table)

    stopping = Stopping(**{name: getattr(job, name) for name in job.__dataclass_fields__})
    with pytest.raises(Stop):
        stopping.run()
    assert checked.num_rows == 9


def generated(job: PlainJob) -> list[int]:
    assert job.log is not None
    return [int(line) for line in job.log.read_text().split()]


def let_go(job: PlainJob) -> None:
    """Let an owner that is this very process look as if it had been silent for long."""
    for heartbeat in (job.output / "_batchgen/owners").glob("*/heartbeat"):
        os.utime(heartbeat, (0, 0))


def visible(job: PlainJob) -> dict[str, bytes]:
    paths = [*(job.output / "data").rglob("*.*"), *(job.output / "errors").rglob("*.*")]
    return {str(path.relative_to(job.output)): path.read_bytes() for path in paths}


def test_a_finished_job_has_nothing_to_do(job: PlainJob) -> None:
    """Case 62: the same arguments again change nothing."""
    job.run()
    before = visible(job)
    assert sorted(before) == [
        *("data/0-00000.parquet", "data/0-00001.parquet", "data/1-00000.parquet"),
        *("data/2-00000.parquet", "data/2-00001.parquet", "errors/0-00001.parquet"),
    ]
    job.run()
    assert visible(job) == before
    assert sorted(generated(job)) == list(range(9))
    assert job.differences() == RIGHT
    assert verify_output(str(job.output)).problems == []


def test_a_stopped_job_goes_on_where_it_stopped(job: PlainJob) -> None:
    """Cases 22 and 55: finished parts are there, and no finished row is computed again."""
    stop_after(job, 4)
    assert sorted(visible(job)) == ["data/0-00000.parquet", "data/0-00001.parquet", "errors/0-00001.parquet"]
    status = read_status(str(job.output))
    assert (status.num_journaled, status.summary.num_rows, status.num_rows) == (2, 5, 9)
    assert status.num_in_flight == 1
    assert status.owner is None
    assert "7 of 9 rows (77.8%)" in "\n".join(status.lines())
    job.run()
    assert sorted(generated(job)) == list(range(9))
    assert job.differences() == RIGHT


def test_the_first_outcomes_of_a_row_stand(job: PlainJob) -> None:
    stop_after(job, 1)
    (journal,) = (job.output / "_batchgen/job/journal").iterdir()
    again = journal.with_name(journal.name.replace("-00000001-", "-00000009-"))
    again.write_bytes(journal.read_bytes())
    job.run()
    assert job.differences() == RIGHT


@pytest.mark.parametrize(
    "options, field",
    [
        ({"system": "other"}, "system"),
        ({"sampling": SamplingParams(seed=1)}, r"sampling \({} then, {\"seed\": 1} now\)"),
        ({"model": "other"}, r"model \(\"fake\" then, \"other\" now\)"),
        ({"revision": "v2"}, "model"),
        ({"tokenizer": "other"}, "tokenizer"),
        ({"limit": 8}, r"limit \(null then, 8 now\)\."),
        ({"on_null": "error"}, "on_null"),
        ({"output_prefix": "r_"}, "output_prefix"),
        ({"generated_tokens": True}, "generated_tokens"),
        ({"apply_chat_template": False}, "apply_chat_template"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"control_tokens": "tokens"}, "control_tokens"),
        ({"prompt_column": None, "prompt": "{{ prompt }}"}, "prompt_column .*; prompt[.;]"),
        ({"prompt_column": None, "messages_column": "prompt"}, "messages_column"),
        ({"sampling_column": "prompt"}, "sampling_column"),
        ({"engine": {"dtype": "bfloat16"}}, "dtype"),
        ({"engine": {"max_context_tokens": 64}}, "max_context_tokens"),
        ({"engine": {"callbacks": ["int8-kv"]}}, r"kv \(null then, .int8. now\)"),
    ],
)
def test_another_job_is_refused_and_the_field_named(
    job: PlainJob, options: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 5."""
    job.run()
    before = visible(job)
    given = replace(job.config(), **options)
    monkeypatch.setattr(PlainJob, "config", lambda self: given)
    with pytest.raises(ResumeMismatchError, match=f"what differs: .*{field}"):
        job.run()
    assert visible(job) == before


@pytest.mark.parametrize("change", ["content", "touched", "added", "removed", "moved"])
def test_input_files_are_known_by_their_content(job: PlainJob, change: str, tmp_path: Path) -> None:
    """A file that changes between runs is refused; one that was only touched or moved is not."""
    stop_after(job, 3)
    path = job.inputs / "2.parquet"
    refused = None
    if change == "content":
        content = bytearray(path.read_bytes())
        content[10] ^= 1  # in a page: size and footer stay as they are
        path.write_bytes(bytes(content))
        refused = r"input \S*2\.parquet: its content changed"
    elif change == "touched":
        os.utime(path, (1, 1))
    elif change == "added":
        pq.write_table(pq.read_table(path), job.inputs / "3.parquet")
        refused = r"input \S*3\.parquet: was not there"
    elif change == "removed":
        path.unlink()
        refused = r"input \S*2\.parquet: is missing"
    else:
        job.inputs.rename(tmp_path / "elsewhere")
        job = replace(job, inputs=tmp_path / "elsewhere")
    if refused is None:
        job.run()
        assert sorted(generated(job)) == list(range(9))
        assert job.differences() == RIGHT
    else:
        with pytest.raises(ResumeMismatchError, match=refused):
            job.run()


def test_a_job_that_did_nothing_yet_may_be_changed(job: PlainJob) -> None:
    stop_after(job, 0)
    assert not job.output.exists()
    path = check_output(str(job.output))
    with open_output(path, job.checked()) as output:
        assert output.ledger.num_missing == 9
        # What a kill here leaves: a manifest, and no row.
        manifest = Path(output.store.places.manifest).read_bytes()
    (job.output / "_batchgen/job").mkdir(parents=True)
    (job.output / "_batchgen/job/manifest.json").write_bytes(manifest)
    other = replace(job, options={"system": "other"})
    other.run()
    assert other.differences() == RIGHT


def test_failed_rows_are_tried_again_and_only_they(job: PlainJob) -> None:
    job.run()
    before = visible(job)
    fixed = replace(job, fails=False, options={"retry_failed": True})
    still_bad = replace(job, options={"retry_failed": True})
    still_bad.run()
    assert sorted(visible(job)) == sorted(
        name.replace("errors/0-00001", "errors/0-00001-r1") for name in before
    )
    assert job.differences() == RIGHT
    fixed.run()
    after = visible(job)
    assert sorted(after) == sorted({*before, "data/0-00001-r2.parquet"} - {"errors/0-00001.parquet"})
    assert all(after[name] == before[name] for name in before if name.startswith("data/"))
    assert fixed.differences() == RIGHT
    assert sorted(generated(job)) == sorted([*range(9), 3, 3])
    report = verify_output(str(job.output))
    assert (report.problems, report.summary.num_ok, report.num_compared) == ([], 9, 9)
    fixed.run()
    assert visible(job) == after


def test_failed_rows_of_an_unfinished_job_are_tried_again(job: PlainJob) -> None:
    stop_after(replace(job, rows_per_item=1), 4)
    fixed = replace(job, fails=False, options={"retry_failed": True})
    fixed.run()
    assert sorted(generated(job)) == sorted([*range(9), 3])
    assert fixed.differences() == RIGHT


def test_old_results_go_when_the_new_ones_are_complete(job: PlainJob) -> None:
    """Case 11."""
    job.run()
    before = visible(job)
    other = replace(job, options={"overwrite": True, "system": "other"})
    stop_after(other, 2)
    assert visible(job) == before
    status = read_status(str(job.output))
    assert status.is_finished
    assert status.replacement is not None
    assert not status.replacement.is_finished
    with pytest.raises(ResumeMismatchError, match=r"system.*--overwrite"):
        replace(other, options={"system": "other"}).run()
    assert job.log is not None
    job.log.unlink()
    other.run()
    assert sorted(generated(job)) == [3, 4, *range(5, 9)]
    assert other.differences() == RIGHT
    assert sorted(visible(job)) == sorted(before)
    assert verify_output(str(job.output)).problems == []
    assert sorted(os.listdir(job.output / "_batchgen")) == ["job", "leases", "owners"]


def test_another_replacement_starts_anew(job: PlainJob) -> None:
    job.run()
    stop_after(replace(job, options={"overwrite": True, "system": "second"}), 3)
    third = replace(job, options={"overwrite": True, "system": "third"})
    third.run()
    assert third.differences() == RIGHT


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_published_files_that_were_touched_are_not_hidden(job: PlainJob, damage: str) -> None:
    job.run()
    path = job.output / "data/0-00000.parquet"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CommitError, match=f"data/0-00000.parquet .*{damage}"):
        job.run()
    assert any("data/0-00000.parquet" in problem for problem in verify_output(str(job.output)).problems)


def test_a_foreign_file_of_a_shards_name_is_not_taken_for_results(job: PlainJob) -> None:
    stop_after(job, 3)
    (job.output / "data/2-00000.parquet").write_bytes(b"foreign")
    job.run()
    assert job.differences() == RIGHT


def test_every_call_of_the_storage_may_fail_once(job: PlainJob, tmp_path: Path) -> None:
    """Promise 10: a named error each time, and the next run finishes."""
    write_inputs(tmp_path / "few", [0, 4])
    steps = StepFiles()
    job = replace(job, inputs=tmp_path / "few")
    job.run(steps)
    for failing in steps.first_of_each_kind():
        kind = (errno.ENOSPC, errno.EIO)[failing % 2]

        def before(number: int, _: str, __: Sequence[Any], failing: int = failing, kind: int = kind) -> None:
            if number == failing:
                raise OSError(kind, os.strerror(kind))

        scratch = replace(job, output=tmp_path / f"out-{failing}", log=None)
        with pytest.raises((CommitError, ConfigError), match=os.strerror(kind)):
            scratch.run(StepFiles(before))
        let_go(scratch)
        scratch.run()
        assert scratch.differences() == RIGHT, failing
        assert verify_output(str(scratch.output)).problems == []


def test_a_stopped_owner_that_wakes_at_any_step_changes_nothing(job: PlainJob, tmp_path: Path) -> None:
    """Promise 4: stopped before a change, succeeded by a run that finishes the job, then woken."""
    write_inputs(tmp_path / "few", [0, 4])
    steps = StepFiles()
    job = replace(job, inputs=tmp_path / "few", log=None)
    job.run(steps)
    woken = 0
    # Up to where the owner gives the lease back.
    stops = [step for step in steps.first_of_each_kind() if steps.trace[step - 1][0] != "remove_folder"]
    for stopped_at in stops:
        scratch = replace(job, output=tmp_path / f"out-{stopped_at}")
        files_after: dict[str, bytes] = {}

        def before(
            number: int,
            _: str,
            __: Sequence[Any],
            stopped_at: int = stopped_at,
            scratch: PlainJob = scratch,
            files_after: dict[str, bytes] = files_after,
        ) -> None:
            if number == stopped_at:
                let_go(scratch)
                scratch.run()
                files_after.update(visible(scratch))

        try:
            scratch.run(StepFiles(before))
        except (JobLockedError, CommitError, ConfigError):
            woken += 1
        assert visible(scratch) == files_after, stopped_at
        assert scratch.differences() == RIGHT, stopped_at
        assert verify_output(str(scratch.output)).problems == []
    assert woken == len(stops) > 15


def test_an_output_folder_is_looked_at_before_it_is_used(job: PlainJob, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    for path, message in (
        (tmp_path / "full", "is not empty"),
        (tmp_path / "full/notes.txt", "is a file"),
        ("memory://bucket/out", "local or mounted folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_output(str(path))
    path = check_output(str(job.output))
    with open_output(path, job.checked()), pytest.raises(JobLockedError, match="another run"):
        check_output(str(job.output))


def test_a_read_only_folder_is_a_config_error(job: PlainJob) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(ConfigError, match=r"out cannot be written: Read-only file system"):
        job.run(StepFiles(refuse))
    assert not job.output.exists()


def test_a_manifest_of_another_version_is_refused(job: PlainJob) -> None:
    job.run()
    path = job.output / "_batchgen/job/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CommitError, match="format 99 is unknown"):
        job.run()


def test_an_output_inside_an_input_folder_is_refused(job: PlainJob) -> None:
    """The next run would take its own results for inputs."""
    for output in (job.inputs, job.inputs / "out"):
        with pytest.raises(ConfigError, match="lies inside the input folder"):
            replace(job, output=output).checked()
    assert replace(job, output=job.inputs.with_name("in2")).checked().num_rows == 9


def test_shards_cover_each_row_once() -> None:
    shards = plan_shards(["a", "b", "x/c"], [10, 0, 3], [4, 5, 3])
    assert [(s.name, s.rows) for s in shards] == [
        ("a-00000", ((0, 4),)),
        ("a-00001", ((4, 8),)),
        ("a-00002", ((8, 10),)),
        ("b-00000", ()),
        ("x/c-00000", ((0, 3),)),
    ]


def test_shards_are_chosen_by_rows_and_bytes(job: PlainJob) -> None:
    file = job.checked().files[0]
    assert choose_shard_rows(replace(file, num_rows=10**6, data_bytes=10**8), 10**6) == 5000
    assert choose_shard_rows(replace(file, num_rows=100, data_bytes=8 * 10**8), 100) == 8
    assert choose_shard_rows(replace(file, num_rows=10**9, data_bytes=10**10), 10**9) == 50_000


def test_rows_are_kept_as_ranges() -> None:
    assert as_ranges([1, 2, 3, 7, 9, 10]) == ((1, 4), (7, 8), (9, 11))
    assert without(((0, 10),), ((0, 2), (4, 5), (9, 12))) == ((2, 4), (5, 9))
    assert without((), ((0, 2),)) == ()


def test_nothing_is_written_where_only_files_are_looked_at(job: PlainJob) -> None:
    for read in (read_status, verify_output):
        with pytest.raises(ConfigError, match="is not the output of a run"):
            read(str(job.output))
    assert not job.output.exists()
    assert LocalFiles().names(str(job.output)) == []
