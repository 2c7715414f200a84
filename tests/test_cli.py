"""The command line: exit codes, messages, what is checked before anything starts."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_data import cli
from batchgen_data.errors import CommitError, ConfigError, InputError
from batchgen_data.job import pipeline as pipeline_module
from batchgen_data.job import preview as preview_module
from batchgen_data.job.check import CheckedJob, JobConfig
from batchgen_data.job.inputs import ROW_ID_COLUMN
from batchgen_data.job.pipeline import Outcomes, Pipeline
from batchgen_data.job.progress import Totals
from batchgen_data.job.reader import RangeReader, WorkItem
from batchgen_data.job.store import JobStore
from batchgen_data.models.source import ModelSource
from batchgen_data.prompts import PromptSpec
from batchgen_data.sampling import SamplingParams
from batchgen_data.schema import Outcome, append_results


def complete(table: pa.Table, job: CheckedJob) -> pa.Table:
    """Stand in for a model: what a prompt says is what becomes of it."""
    outcomes = []
    if "prompt" in table.column_names:
        prompts = table.column("prompt").to_pylist()
    else:
        prompts = [json.loads(value)[-1]["content"] for value in table.column("messages").to_pylist()]
    for prompt in prompts:
        if prompt is None:
            outcome = Outcome(finish_reason="skipped", error_code="null_input", error_message="it is null")
        elif prompt == "too long":
            outcome = Outcome(finish_reason="error", error_code="prompt_too_long", error_message="70 of 64")
        else:
            reason = "length" if prompt == "on and on" else "stop"
            outcome = Outcome(finish_reason=reason, text=prompt.upper(), token_ids=[1, 2], num_input_tokens=3)
        outcomes.append(outcome)
    config = job.config
    return append_results(
        table, outcomes, generated_tokens=config.generated_tokens, prefix=config.output_prefix
    )


class Fake:
    """Replaces workers and model; remembers the jobs it was given."""

    def __init__(self) -> None:
        self.jobs: list[CheckedJob] = []
        self.fail: Callable[[], None] = lambda: None
        self.totals: Callable[[], Totals] = lambda: Totals(generating_s=2.0)

    @contextmanager
    def open_pipeline(
        self, job: CheckedJob, cut: Callable[[int], list[WorkItem]], *, worker: dict[str, Any], **_: Any
    ) -> Iterator[Pipeline]:
        self.jobs.append(job)

        def outcomes() -> Iterator[Outcomes]:
            reader = RangeReader(job.files)
            for item in cut(2):
                self.fail()
                results = complete(reader.read(item), job).select(worker["result_names"])
                yield Outcomes(item, results.replace_schema_metadata(None), is_kept=False)

        yield Pipeline(outcomes(), json.dumps({"device": "fake"}), self.totals)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    fake = Fake()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline_module, "open_pipeline", fake.open_pipeline)
    monkeypatch.setattr(
        "batchgen_data.job.check.resolve_source",
        lambda model, revision=None, needs="model": ModelSource(
            kind="hub", name=model, revision=revision or ("pinned" if needs == "tokenizer" else None)
        ),
    )
    return fake


def write(name: str, *prompts: str | None, **columns: list[Any]) -> str:
    Path(name).parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string()), **columns}), name)
    return name


RUN = ("-o", "out", "-m", "org/model", "--prompt-column", "prompt")


def test_all_rows_ok(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    write("in/a.parquet", "one", "two", "three", n=[1, 2, 3])
    write("in/b.parquet", "on and on")
    assert cli.main(["run", "in", *RUN]) == 0
    printed = capsys.readouterr()
    assert "4 rows = 4 ok (3 stop, 1 length) + 0 failed + 0 skipped" in printed.out
    assert "12 prompt tokens, 8 generated tokens, 4.0 generated tokens/s" in printed.out
    assert "results: out/data" in printed.out
    assert "4 rows in 2 files" in printed.err
    table = pq.read_table("out/data/a-00000.parquet")
    assert table.column("generated_text").to_pylist() == ["ONE", "TWO", "THREE"]
    assert table.column("n").to_pylist() == [1, 2, 3]
    assert ROW_ID_COLUMN not in table.column_names
    assert sorted(p.name for p in Path("out/_batchgen").iterdir()) == ["job", "leases", "owners", "run.json"]


def test_files_have_one_schema_whatever_their_rows_did(fake: Fake) -> None:
    """Case 2: the error columns are strings even where every row succeeds."""
    write("in/a.parquet", "fine")
    write("in/b.parquet", "too long")
    assert cli.main(["run", "in", *RUN]) == 3
    names = ("data/a", "data/b", "errors/b")
    first, second, third = (pq.read_schema(f"out/{name}-00000.parquet") for name in names)
    assert first.equals(second)
    assert first.equals(third)
    assert first.field("error_message").type == pa.string()


def test_row_errors_exit_3_and_skipped_rows_alone_0(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    write("a.parquet", "one", None, "too long", "too long", None)
    assert cli.main(["run", "a.parquet", *RUN]) == 3
    printed = capsys.readouterr().out
    assert "5 rows = 1 ok (1 stop, 0 length) + 2 failed + 2 skipped" in printed
    assert re.search(r"prompt_too_long +2 +a\.parquet:2 +70 of 64", printed)
    assert re.search(r"null_input +2 +a\.parquet:1 +it is null", printed)
    write("b.parquet", "one", None)
    assert cli.main(["run", "b.parquet", *RUN[2:], "-o", "out2"]) == 0


def test_fail_fast_stops_with_the_rows_location(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    write("in/a.parquet", "one")
    write("in/b.parquet", "one", "two", "three", "too long", "five")
    assert cli.main(["run", "in", *RUN, "--fail-fast"]) == 1
    assert re.search(
        r"^error: row \S*in/b\.parquet:3 failed \(prompt_too_long\): 70 of 64;", capsys.readouterr().err, re.M
    )
    # The first file was complete; of the second nothing is visible.
    assert sorted(p.name for p in Path("out").rglob("*.parquet")) == ["a-00000.parquet"]
    assert json.loads(Path("out/_batchgen/run.json").read_text())["status"] == "failed"


def test_limit_takes_the_first_rows(fake: Fake) -> None:
    write("in/a.parquet", "one", "two", "three")
    write("in/b.parquet", "four", "five")
    write("in/c.parquet", "six")
    assert cli.main(["run", "in", *RUN, "--limit", "4"]) == 0
    assert sorted(p.name for p in Path("out/data").iterdir()) == ["a-00000.parquet", "b-00000.parquet"]
    assert pq.read_table("out/data/b-00000.parquet").column("prompt").to_pylist() == ["four"]


def test_json_lines_and_csv_in_parquet_out(fake: Fake) -> None:
    Path("a.jsonl").write_text('{"prompt": "one", "id": "007"}\n{"prompt": "two"}\n')
    Path("b.csv").write_text('prompt,id\n"three, four",7\n')
    assert cli.main(["run", "a.jsonl", "b.csv", *RUN]) == 0
    assert pq.read_table("out/data/a-00000.parquet").column("id").to_pylist() == ["007", None]
    assert pq.read_table("out/data/b-00000.parquet").column("generated_text").to_pylist() == ["THREE, FOUR"]


def test_no_rows_need_no_workers(fake: Fake) -> None:
    write("a.parquet")
    assert cli.main(["run", "a.parquet", *RUN]) == 0
    assert fake.jobs == []
    table = pq.read_table("out/data/a-00000.parquet")
    assert (table.num_rows, table.column_names[:2]) == (0, ["prompt", "generated_text"])


def test_the_record_says_what_ran(fake: Fake) -> None:
    write("a.parquet", "one", None)
    given = ["--temperature", "0.5", "--stop", "x", "--stop", "y", "--kv-memory", "1GiB", "--seed", "3"]
    assert cli.main(["run", "a.parquet", *RUN, *given]) == 0
    record = json.loads(Path("out/_batchgen/run.json").read_text())
    assert record["status"] == "finished"
    assert record["settings"]["sampling"] == {"temperature": 0.5, "stop": ["x", "y"], "seed": 3}
    assert record["settings"]["engine"] == {"kv_memory": "1GiB"}
    assert record["worker"] == {"device": "fake"}
    assert record["files"] == [
        {"input": "a.parquet", "first_row": 0, "output": "data/a-00000.parquet", "rows": 2}
    ]
    assert record["counts"]["rows"] == 2
    assert set(record["versions"]) >= {"python", "torch", "ray", "pyarrow"}


def test_options_reach_the_stage(fake: Fake) -> None:
    write("a.parquet", "one")
    options = [
        "--sampling",
        '{"temperature": 0.2, "top_p": 0.9}',
        "--temperature",
        "0.7",
        "--max-tokens",
        "9",
    ]
    options += ["--raw", "--on-null", "error", "--num-threads", "2", "--generated-tokens", "--revision", "v1"]
    options += ["--tokenizer", "org/other", "--callback", "prompt-lookup", "--callback", "int8-kv"]
    options += ["--logit-bias", '{"5": -1}', "--stop-token-id", "4", "--ignore-eos", "--output-prefix", "r_"]
    assert cli.main(["run", "a.parquet", *RUN, *options]) == 0
    assert pq.read_table("out/data/a-00000.parquet").column("r_generated_tokens").to_pylist() == [[1, 2]]
    (job,) = fake.jobs
    assert job.options["sampling"] == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        max_tokens=9,
        logit_bias={"5": -1},
        stop_token_ids=[4],
        ignore_eos=True,
    )
    expected = {
        "model": "org/model",
        "prompt_column": "prompt",
        "apply_chat_template": False,
        "on_null": "error",
        "num_threads": 2,
        "callbacks": ["prompt-lookup", "int8-kv"],
        "generated_tokens": True,
        "revision": "v1",
        "tokenizer": "org/other@pinned",
        "output_prefix": "r_",
        "row_id_column": ROW_ID_COLUMN,
    }
    assert {name: job.options[name] for name in expected} == expected
    record = json.loads(Path("out/_batchgen/run.json").read_text())
    assert record["settings"]["tokenizer"] == "org/other"
    assert record["settings"]["engine"]["callbacks"] == ["prompt-lookup", "int8-kv"]
    assert record["tokenizer"] == "org/other@pinned"


def test_variables_of_the_chat_template_reach_the_stage_and_the_record(fake: Fake) -> None:
    write("a.parquet", "one")
    given = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert cli.main(["run", "a.parquet", *RUN, *given]) == 0
    assert fake.jobs[0].options["chat_template_kwargs"] == {"enable_thinking": False}
    settings = json.loads(Path("out/_batchgen/run.json").read_text())["settings"]
    assert settings["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run"], r"Missing argument 'IN'"),
        (["rum", "a.parquet"], r"No such command 'rum'.*'run'"),
        (["run", "a.parquet", *RUN, "--temprature", "1"], r"No such option: --temprature.*--temperature"),
        (["run", "a.parquet", *RUN, "--max-tokens", "many"], r"'--max-tokens'"),
        (["run", "a.parquet", "-o", "out", "-m", "org/model"], r"exactly one of prompt_column"),
        (["run", "a.parquet", *RUN, "--prompt", "x"], r"exactly one of prompt_column"),
        (["run", "a.parquet", *RUN[:5], "prompts"], r"'prompts' is not in the input; did you mean 'prompt'"),
        (["run", "a.parquet", *RUN[:4], "--prompt", "{{ promt }}"], r"promt.*did you mean 'prompt'"),
        (["run", "a.parquet", *RUN[:4], "--prompt", "{{ prompt"], r"template"),
        (["run", "absent", *RUN], r"input absent does not exist"),
        (["run", "broken.parquet", *RUN], r"broken\.parquet is not a Parquet file"),
        (["run", "taken.parquet", *RUN], r"taken\.parquet: .*'finish_reason'.*output_prefix"),
        (["run", "a.parquet", *RUN[2:], "-o", "full"], r"output full is not empty"),
        (["run", "a.parquet", *RUN, "--top-p", "7"], r"top_p.*at most 1"),
        (["run", "a.parquet", *RUN, "--sampling", "{"], r"--sampling is not JSON"),
        (["run", "a.parquet", *RUN, "--sampling", "[1]"], r"--sampling must be a JSON object"),
        (["run", "a.parquet", *RUN, "--sampling", '{"temprature": 1}'], r"did you mean 'temperature'"),
        (["run", "a.parquet", *RUN, "--kv-memory", "lots"], r"kv_memory must be a size"),
        (["run", "a.parquet", *RUN, "--limit", "0"], r"limit must be a whole number of at least 1"),
        (["run", "a.parquet", *RUN, "--format", "xml"], r"format 'xml' is unknown"),
        (["run", "a.parquet", *RUN, "--on-null", "ignore"], r"on_null='ignore' is unknown"),
        (["run", "a.parquet", *RUN, "--dtype", "foo"], r"unknown dtype 'foo'; use auto, float32"),
        (["run", "a.parquet", *RUN, "--device", "gpu"], r"unknown device 'gpu'; use auto, cpu, cuda"),
        (["run", "a.parquet", *RUN, "--num-gpus", "nan"], r"num_gpus must be a number of at least 0"),
        (["run", "a.parquet", *RUN, "--possible", "1"], r"No such option: --possible$"),
        (["run", "a.parquet", *RUN, "--max-token", "1"], r"--max-token; did you mean '--max-tokens'\?$"),
        (["run", "a.parquet", *RUN, "--seed"], r".*--seed.* requires an argument$"),
        (["run", "a.parquet", *RUN, "--sampling", '{"temperature": 1' + "0" * 400 + "}"], r"temperature="),
        (["run", "a.parquet", *RUN, "--chat-template-kwargs", "[]"], r".*such as {\"enable_thinking\""),
        (["run", "a.parquet", *RUN, "--chat-template-kwargs", '{"tokenize": 1}'], r".*cannot set tokenize"),
        (["run", "a.parquet", *RUN, "--raw", "--chat-template-kwargs", "{}"], r".*needs the chat template"),
        (["run", "a\x1b[31m.parquet", *RUN], "input a\ufffd\\[31m.parquet: no data files there"),
        (
            ["preview", "a.parquet", "-m", "x", "--prompt-column", "prompt", "-n", "0"],
            r"Invalid value for .*'-n'",
        ),
        (["preview", "a.parquet", "-m", "x", "--prompt-column", "q"], r"'q' is not in the input"),
    ],
)
def test_what_cannot_work_exits_2_before_anything_starts(
    fake: Fake, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    write("a.parquet", "one")
    write("taken.parquet", "one", finish_reason=["x"])
    Path("broken.parquet").write_text("nothing")
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert re.match(f"error: .*{message}", printed.err)
    assert fake.jobs == []
    assert not Path("out").exists()


def test_an_unknown_model_exits_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write("a.parquet", "one")
    arguments = ["run", "a.parquet", "-o", "out", "-m", "./models/none", "--prompt-column", "prompt"]
    assert cli.main(arguments) == 2
    assert "./models/none" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "error, code, message",
    [
        (InputError("a.parquet, row group 1, cannot be read"), 1, "error: a.parquet, row group 1"),
        (ConfigError("the model needs a chat template"), 2, "error: the model needs"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (ZeroDivisionError("x"), 1, "error: ZeroDivisionError: x (a bug"),
    ],
)
def test_what_stops_a_run_sets_the_code_and_leaves_no_half_file(
    fake: Fake, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    write("a.parquet", *"abcdef")
    num_calls = 0

    def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise error

    fake.fail = fail
    assert cli.main(["run", "a.parquet", *RUN]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(message)
    assert list(Path("out").rglob("*.parquet")) == []
    fake.fail = lambda: None
    assert cli.main(["run", "a.parquet", *RUN]) == 0
    assert "6 rows in 1 file, 2 of them done before" in capsys.readouterr().err
    assert cli.main(["verify", "out"]) == 0


def test_what_stops_a_run_before_its_first_row_leaves_nothing(fake: Fake) -> None:
    def fail() -> None:
        raise ConfigError("the model needs a chat template")

    fake.fail = fail
    write("a.parquet", "x")
    assert cli.main(["run", "a.parquet", *RUN]) == 2
    assert not Path("out").exists()
    Path("out").mkdir()
    assert cli.main(["run", "a.parquet", *RUN]) == 2
    assert list(Path("out").iterdir()) == []


def test_a_finished_run_is_not_failed_by_a_question_about_its_speed(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_answer() -> Totals:
        raise TimeoutError("the counter is busy")

    fake.totals = no_answer
    write("a.parquet", "one")
    assert cli.main(["run", "a.parquet", *RUN]) == 0
    assert "1 rows = 1 ok" in capsys.readouterr().out
    record = json.loads(Path("out/_batchgen/run.json").read_text())
    assert (record["status"], record["counts"]["generating_s"]) == ("finished", 0)


@pytest.mark.parametrize(
    "error, code, message",
    [
        (KeyboardInterrupt(), 130, "error: interrupted; finished rows are kept"),
        (InputError("b.parquet is damaged"), 1, "error: b.parquet is damaged"),
        (None, 1, "error: output out: run.json cannot be written"),
    ],
)
def test_a_record_that_cannot_be_written_hides_no_earlier_error_and_leaves_no_staging(
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    code: int,
    message: str,
) -> None:
    write("in/a.parquet", "one")
    write("in/b.parquet", "two")

    def refuse(self: JobStore, path: str, content: bytes) -> None:
        raise CommitError("output out: run.json cannot be written: disk full")

    def fail() -> None:
        if error is not None and Path("out/data/a-00000.parquet").exists():
            raise error

    monkeypatch.setattr(JobStore, "replace_report", refuse)
    fake.fail = fail
    assert cli.main(["run", "in", *RUN]) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert list(Path("out/_batchgen/owners").iterdir()) == []
    assert Path("out/data/a-00000.parquet").exists()


@pytest.mark.parametrize(
    "options",
    [{"limit": True}, {"num_actors": 1.5}, {"batch_size": "8"}, {"num_gpus": "x"}, {"num_gpus": True}],
)
def test_job_numbers_of_the_wrong_type_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} must be"):
        JobConfig(inputs=("a",), model="m", **options)


def test_a_summary_obeys_no_escape_sequence(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    write("a\x1b[2J.parquet", "too long")
    assert cli.main(["run", "a\x1b[2J.parquet", *RUN]) == 3
    printed = capsys.readouterr()
    assert "a\ufffd[2J.parquet:0" in printed.out
    assert "\x1b" not in printed.out + printed.err


def test_an_interrupted_run_is_let_go_of_at_once(fake: Fake) -> None:
    """Its frames hold Ray's iterators: freed by the collector at exit, they would start Ray again."""

    class Interrupt(KeyboardInterrupt):
        pass

    interrupts: list[weakref.ref[Interrupt]] = []

    def fail() -> None:
        error = Interrupt()
        interrupts.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    fake.fail = fail
    write("a.parquet", "one")
    gc.disable()
    try:
        assert cli.main(["run", "a.parquet", *RUN]) == 130
        assert [interrupt() for interrupt in interrupts] == [None]
    finally:
        gc.enable()


def test_debug_shows_the_traceback(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "absent", *RUN, "--debug"]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.splitlines()[-1] == "error: input absent does not exist"


class FakeLLM:
    """Stands in for the runtime in `batchgen preview`."""

    class tokenizer:
        decode = staticmethod(lambda ids: f"<{ids[0]} tokens>")

    def __init__(self, *, _spec: PromptSpec, **options: Any) -> None:
        assert options == {"model": "org/model", "revision": None, "tokenizer": None, "num_threads": 1}
        self.spec = _spec

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map_table(self, table: pa.Table, *, spec: PromptSpec, **_: Any) -> pa.Table:
        assert spec == self.spec
        config = JobConfig(inputs=(), model="", prompt_column="prompt")
        return complete(table, CheckedJob(config=config, files=[], rows_by_file=[], ignored=[], options={}))

    def encode(self, table: pa.Table, **prompt_options: Any) -> list[list[int] | None]:
        assert PromptSpec(**prompt_options) == self.spec
        return [None if text is None else [len(text)] for text in table.column("prompt").to_pylist()]


def test_preview_shows_prompts_and_completions(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preview_module, "_llm_class", lambda: FakeLLM)
    write("in/a.parquet", "one\x1b[31m", None)
    write("in/b.parquet", "[markup]", "too long", "unseen")
    arguments = ["preview", "in", "-m", "org/model", "--prompt-column", "prompt", "-n", "4"]
    assert cli.main([*arguments, "--num-threads", "1"]) == 3
    printed = capsys.readouterr().out
    for shown in (
        "in/a.parquet:0",
        "<8 tokens>",
        "ONE\ufffd[31M",
        "[stop, 2 tokens]",
        "(no prompt)",
        "[MARKUP]",
    ):
        assert shown in printed
    assert "[skipped: null_input] it is null" in printed
    assert "in/b.parquet:1" in printed
    assert "[error: prompt_too_long] 70 of 64" in printed
    assert "UNSEEN" not in printed


def test_preview_names_the_row_even_where_the_path_is_long(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preview_module, "_llm_class", lambda: FakeLLM)
    folder = "a" * 100
    write(f"{folder}/b.parquet", "one")
    arguments = ["preview", folder, "-m", "org/model", "--prompt-column", "prompt"]
    assert cli.main([*arguments, "--num-threads", "1"]) == 0
    assert "aa/b.parquet:0" in capsys.readouterr().out


def test_an_interrupted_preview_says_nothing_of_an_output(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preview_module, "_llm_class", interrupt)
    write("a.parquet", "one")
    assert cli.main(["preview", "a.parquet", "-m", "org/model", "--prompt-column", "prompt"]) == 130
    assert capsys.readouterr().err.splitlines() == ["error: interrupted"]


def test_version_and_help_need_neither_torch_nor_ray() -> None:
    script = (
        "import sys; from batchgen_data import cli; "
        "assert [cli.main(a) for a in "
        "(['--version'], [], ['run', '--help'], ['plan', '--help'])] == [0] * 4; "
        "sys.exit(' '.join({'torch', 'ray', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("batchgen 0.")


def test_option_names_are_frozen() -> None:
    """Scripts depend on them: renaming one is a decision, not an accident."""
    kinds = (cli.RunOptions, cli.PreviewOptions, cli.PlanOptions)
    names = {field for kind in kinds for field in kind.__dataclass_fields__}
    assert names == {
        *("model", "prompt", "prompt_column", "messages_column", "system", "raw", "on_null"),
        *("sampling_column", "sampling", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("seed", "logit_bias", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
        *("do_sample", "revision", "tokenizer", "device", "dtype", "num_threads", "kv_memory"),
        *("max_sequences", "max_step_tokens", "max_context_tokens", "format", "generated_tokens"),
        *("output_prefix", "debug", "output", "limit", "num_actors", "num_gpus", "batch_size", "fail_fast"),
        *("num_rows", "chat_template_kwargs", "control_tokens"),
        *("max_failed_rows", "retry_failed", "overwrite", "stall_timeout_s"),
        *("weights_memory", "kv_residence", "host_memory", "host_path", "attention_sub_batch", "trace"),
        *("moe_batch_tokens", "yield_at", "callbacks", "input", "device_memory", "explain", "json"),
    }
    assert set(SamplingParams.__dataclass_fields__) <= names


@pytest.mark.parametrize(
    "budget, code, message",
    [
        (
            "1",
            4,
            r"error: 2 rows failed, 1 may \(max_failed_rows\); mostly prompt_too_long, first at \S+:0",
        ),
        ("20%", 4, "error: 2 rows failed, 1 may"),
        ("2", 3, None),
        ("33.4%", 3, None),
    ],
)
def test_more_failed_rows_than_allowed_stop_the_job(
    fake: Fake, capsys: pytest.CaptureFixture[str], budget: str, code: int, message: str | None
) -> None:
    """Promise 7: a broken job does not look successful."""
    write("a.parquet", "too long", "one", "too long", "two", "three", "four")
    assert cli.main(["run", "a.parquet", *RUN, "--max-failed-rows", budget]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    if message is not None:
        assert re.match(message, last)
        assert not Path("out/data/a-00000.parquet").exists()
        # Stopped at once again as long as nothing changes, without any work.
        assert cli.main(["run", "a.parquet", *RUN, "--max-failed-rows", budget]) == code
        assert len(fake.jobs) == 1
        assert cli.main(["run", "a.parquet", *RUN]) == 3
        assert "4 rows = " not in capsys.readouterr().out
    assert pq.read_table("out/errors/a-00000.parquet").num_rows == 2


def test_failed_rows_are_tried_again_when_asked(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    write("a.parquet", "one", "too long", "two")
    assert cli.main(["run", "a.parquet", *RUN, "--fail-fast"]) == 1
    assert cli.main(["run", "a.parquet", *RUN, "--fail-fast"]) == 1
    assert cli.main(["run", "a.parquet", *RUN]) == 3
    assert cli.main(["run", "a.parquet", *RUN, "--retry-failed"]) == 3
    assert len(fake.jobs) == 3
    printed = capsys.readouterr()
    assert "3 rows in 1 file, 2 of them done before; starting the workers" in printed.err
    totals = [line for line in printed.out.splitlines() if line.startswith("3 rows = ")]
    assert totals == ["3 rows = 2 ok (2 stop, 0 length) + 1 failed + 0 skipped"] * 2
    assert cli.main(["status", "out"]) == 0
    assert re.search(r"prompt_too_long +1 +a\.parquet:1 +70 of 64", capsys.readouterr().out)
    assert cli.main(["verify", "out"]) == 0
    assert capsys.readouterr().out.startswith("2 files with 3 of 3 rows read: each row once")


def test_verify_exits_1_and_names_what_is_wrong(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    write("a.parquet", "one")
    assert cli.main(["run", "a.parquet", *RUN]) == 0
    Path("out/data/a-00000.parquet").unlink()
    capsys.readouterr()
    assert cli.main(["verify", "out/"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "problem: data/a-00000.parquet is gone"
    assert cli.main(["verify", "elsewhere"]) == 2
    assert cli.main(["status", "elsewhere"]) == 2
    assert "elsewhere is not the output of a run" in capsys.readouterr().err


def test_results_are_replaced_only_when_asked(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    write("a.parquet", "one")
    assert cli.main(["run", "a.parquet", *RUN]) == 0
    assert cli.main(["run", "a.parquet", *RUN, "--seed", "2"]) == 2
    assert "what differs: sampling" in capsys.readouterr().err
    assert cli.main(["run", "a.parquet", *RUN, "--seed", "2", "--overwrite"]) == 0
    record = json.loads(Path("out/_batchgen/run.json").read_text())
    assert record["settings"]["sampling"] == {"seed": 2}
    assert cli.main(["run", "a.parquet", *RUN, "--seed", "2"]) == 0
    assert len(fake.jobs) == 2


def test_the_summary_says_that_kv_memory_was_short(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 38: evictions appear in the report, with advice."""
    write("a.parquet", "one")
    fake.totals = lambda: Totals(generating_s=2.0, yields_for_pages=7, recomputed_tokens=900)
    assert cli.main(["run", "a.parquet", *RUN]) == 0
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("KV memory was short")
    ]
    assert "suspended 7 times and 900 tokens computed again; raise kv_memory" in line
    counts = json.loads(Path("out/_batchgen/run.json").read_text())["counts"]
    assert (counts["run_yields"], counts["run_recomputed_tokens"]) == (7, 900)


def test_batch_requests_come_back_as_results_and_errors(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def request(custom_id: str, content: str) -> str:
        body = {"model": "gpt", "messages": [{"role": "user", "content": content}], "max_tokens": 9}
        return json.dumps(
            {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
        )

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(name).read_text().splitlines()]

    contents = ["one", "too long", "on and on", "grün"]
    Path("in.jsonl").write_text("\n".join(request(f"id-{i}", text) for i, text in enumerate(contents)))
    arguments = ["run", "in.jsonl", "-o", "out", "-m", "org/model", "--format", "openai"]
    assert cli.main(arguments) == 3
    results = lines("out/results.jsonl")
    assert [(one["custom_id"], one["error"]) for one in results] == [
        ("id-0", None),
        ("id-2", None),
        ("id-3", None),
    ]
    body = results[0]["response"]["body"]
    assert results[0]["response"]["status_code"] == 200
    assert (body["object"], body["model"]) == ("chat.completion", "org/model")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ONE", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert results[1]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert results[2]["response"]["body"]["choices"][0]["message"]["content"] == "GRÜN"
    (failed,) = lines("out/errors.jsonl")
    assert (failed["custom_id"], failed["response"]) == ("id-1", None)
    assert failed["error"] == {"code": "prompt_too_long", "message": "70 of 64"}
    assert len({one["id"] for one in [*results, failed]}) == 4
    # Again: nothing runs, nothing changes; what a kill left out is made.
    before = Path("out/results.jsonl").stat()
    Path("out/errors.jsonl").unlink()
    assert cli.main(arguments) == 3
    assert len(fake.jobs) == 1
    assert Path("out/results.jsonl").stat().st_ino == before.st_ino
    assert lines("out/errors.jsonl") == [failed]
    assert cli.main(["verify", "out"]) == 0
    assert cli.main([*arguments, "--prompt-column", "custom_id"]) == 2
    assert "prompt_column has no effect on batch requests" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["many", "-1", "1.5", "101%", "%", ""])
def test_a_budget_that_is_none_is_refused(budget: str) -> None:
    with pytest.raises(ConfigError, match="max_failed_rows must be a number of rows or a share such as 5%"):
        JobConfig(inputs=("a",), model="m", max_failed_rows=budget)
