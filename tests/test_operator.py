"""The stage through Ray Data, as its users write it. One Ray session for the whole file."""

from __future__ import annotations

import datetime as dt
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen_data
from batchgen_data import LLM, BatchGenLLM, ConfigError, SamplingParams, generate
from batchgen_data.schema import result_fields
from tiny_models import tiny_checkpoint

pytestmark = pytest.mark.ray

# Tiny: a KV pool of a few MB, one thread, so that several actors of the suite fit on two cores.
OPTIONS = {"num_threads": 1, "kv_memory": "32MiB", "max_context_tokens": 64, "max_sequences": 16}
SETTINGS = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", chat_template=True))


@pytest.fixture(scope="module")
def ray():
    import ray
    import ray.data

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    yield ray
    ray.shutdown()


def table_of(num_rows):
    return pa.table({"id": list(range(num_rows)), "prompt": [f"say {i}" for i in range(num_rows)]})


@pytest.fixture(scope="module")
def expected(model):
    """What the runtime without Ray says to the prompts of `table_of`."""
    with LLM(model, **OPTIONS) as llm:
        outcomes = llm.generate(table_of(40)["prompt"].to_pylist(), SamplingParams(**SETTINGS))
    return [outcome.text for outcome in outcomes]


def collect(ds):
    return pa.concat_tables(ds.iter_batches(batch_format="pyarrow", batch_size=None))


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_generate_completes_every_row_in_order(ray, model, expected, batch_size):
    ds = generate(
        ray.data.from_arrow(table_of(40)),
        model,
        prompt_column="prompt",
        sampling=SETTINGS,
        batch_size=batch_size,
        **OPTIONS,
    )
    out = collect(ds)
    assert out["id"].to_pylist() == list(range(40))
    assert out["generated_text"].to_pylist() == expected
    assert out.schema.names == ["id", "prompt", *(field.name for field in result_fields())]


@pytest.mark.parametrize(
    "how",
    ["threads", "one call at a time", "concurrency"],
)
def test_map_batches_as_ray_users_write_it(ray, model, expected, how):
    if how == "threads":
        arguments = {
            "compute": ray.data.ActorPoolStrategy(
                size=2, max_concurrent_calls_per_actor=4, enable_true_multi_threading=True
            )
        }
    elif how == "concurrency":
        arguments = {"concurrency": 1}
    else:
        arguments = {"compute": ray.data.ActorPoolStrategy(size=1)}
    ds = (
        ray.data.from_arrow(table_of(40))
        .repartition(target_num_rows_per_block=8)
        .map_batches(
            BatchGenLLM,
            fn_constructor_kwargs={
                "model": model,
                "prompt_column": "prompt",
                "sampling": SETTINGS,
                **OPTIONS,
            },
            batch_format="pyarrow",
            batch_size=8,
            num_cpus=0.5,
            **arguments,
        )
    )
    out = collect(ds)
    assert out["id"].to_pylist() == list(range(40))
    assert out["generated_text"].to_pylist() == expected


def test_parquet_in_and_out_keeps_every_type(ray, model, tmp_path):
    """Cases 8 and 19: zones, nulls and NaN as they were; case 2: one schema whatever the rows did."""
    zone = "Europe/Paris"
    moment = dt.datetime(2024, 3, 31, 12, tzinfo=dt.UTC)
    columns = {
        "prompt": pa.array(["a", None, "", "b"], pa.large_string()),
        "whole": pa.array([1, None, 3, 4], pa.int64()),
        "real": pa.array([1.5, None, math.nan, -0.0], pa.float64()),
        "flag": pa.array([True, None, False, None]),
        "nested": pa.array(
            [{"x": [1, 2]}, None, {"x": None}, {"x": []}], pa.struct({"x": pa.list_(pa.int8())})
        ),
        "word": pa.array(["u", "v", None, "u"]).dictionary_encode(),
        **{
            f"at_{unit}": pa.array([moment, None, moment, moment], pa.timestamp(unit, tz=zone))
            for unit in ("s", "ms", "us", "ns")
        },
    }
    for name in ("good", "bad"):
        part = pa.table(columns)
        part = part.take([0, 3]) if name == "good" else part
        pq.write_table(part, tmp_path / f"{name}.parquet")
    outs = []
    for name in ("good", "bad"):
        ds = generate(
            ray.data.read_parquet(str(tmp_path / f"{name}.parquet")),
            model,
            prompt_column="prompt",
            sampling=SETTINGS,
            **OPTIONS,
        )
        outs.append(collect(ds))
        source = pq.read_table(tmp_path / f"{name}.parquet")
        kept = outs[-1].select(source.column_names)
        assert kept.schema.types == source.schema.types
        for column in source.column_names:
            got, want = kept[column].combine_chunks(), source[column].combine_chunks()
            assert got.equals(want) or (column == "real" and str(got) == str(want)), column
    assert outs[0].schema.equals(outs[1].schema)
    assert outs[1]["finish_reason"].to_pylist() == ["length", "skipped", "error", "length"]
    assert outs[1]["error_code"].to_pylist() == [None, "null_input", "empty_prompt", None]


def test_case_1_one_bad_row_fails_alone_and_strict_mode_stops(ray, model):
    prompts = ["word " * 200 if i == 17 else f"say {i}" for i in range(40)]
    ds = ray.data.from_arrow(pa.table({"prompt": prompts}))
    options = {"prompt_column": "prompt", "sampling": SETTINGS, **OPTIONS}
    out = collect(generate(ds, model, **options))
    assert [i for i, reason in enumerate(out["finish_reason"].to_pylist()) if reason == "error"] == [17]
    assert "the model's context holds 64" in out["error_message"][17].as_py()
    with pytest.raises(Exception, match="prompt_too_long"):
        collect(generate(ds, model, on_row_error="raise", **options))


def test_case_7_order_holds_when_the_first_block_is_the_slowest(ray, model):
    table = pa.table(
        {
            "row": list(range(24)),
            "prompt": [f"say {i}" for i in range(24)],
            "settings": [{"max_tokens": 40 if i < 8 else 2, "ignore_eos": True} for i in range(24)],
        }
    )
    ds = ray.data.from_arrow(table)
    out = collect(
        generate(ds, model, prompt_column="prompt", sampling_column="settings", batch_size=8, **OPTIONS)
    )
    assert out["row"].to_pylist() == list(range(24))
    assert out["num_generated_tokens"].to_pylist() == [40] * 8 + [2] * 16


def test_a_dataset_without_rows_ends(ray, model):
    empty = pa.table({"prompt": pa.array([], pa.string())})
    out = generate(ray.data.from_arrow(empty), model, prompt_column="prompt", **OPTIONS)
    assert out.count() == 0


@pytest.mark.parametrize(
    "options,message",
    [
        ({"prompt_column": "promt"}, "did you mean 'prompt'"),
        ({"prompt": "{{ text }}"}, "text"),
        ({"prompt_column": "prompt", "temprature": 1}, "did you mean"),
        ({"prompt_column": "prompt", "max_sequence": 8}, "did you mean 'max_sequences'"),
        ({"prompt_column": "prompt", "sampling": {"top_pp": 1}}, "did you mean 'top_p'"),
        ({"prompt_column": "prompt", "batch_size": 0}, "batch_size"),
        ({"prompt_column": "prompt", "on_row_error": "ignore"}, "on_row_error"),
        ({"prompt_column": "prompt", "num_gpus": 1}, "the cluster has 0"),
        ({"prompt_column": "prompt", "num_actors": 0}, "num_actors"),
        ({"prompt_column": "prompt", "device": "gpu"}, "unknown device"),
        ({}, "prompt_column"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_loads(ray, model, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(ray.data.from_arrow(table_of(3)), model, **options)


def test_an_unknown_model_and_a_taken_column_name_are_refused_at_once(ray, model):
    ds = ray.data.from_arrow(table_of(3))
    with pytest.raises(ConfigError, match="no/such/folder"):
        generate(ds, "no/such/folder", prompt_column="prompt")
    taken = ray.data.from_arrow(table_of(3).append_column("generated_text", [["x"] * 3]))
    with pytest.raises(ConfigError, match="output_prefix"):
        generate(taken, model, prompt_column="prompt")
    again = generate(taken, model, prompt_column="prompt", output_prefix="new_", sampling=SETTINGS, **OPTIONS)
    out = collect(again)
    assert out["generated_text"].to_pylist() == ["x"] * 3
    assert out["new_finish_reason"].to_pylist() == ["length"] * 3


@pytest.fixture(scope="module")
def stage(model):
    stage = BatchGenLLM(model, prompt_column="prompt", sampling=SETTINGS, **OPTIONS)
    yield stage
    stage.close()


class TestWithoutRay:
    """What needs an actor but no Ray session."""

    def test_case_52_calls_of_any_size_return_their_own_rows(self, stage, expected):
        for size in (5, 0, 12, 1):
            out = stage(table_of(size))
            assert out["id"].to_pylist() == list(range(size))
            assert out.schema.names == ["id", "prompt", *(field.name for field in result_fields())]
            assert out["generated_text"].to_pylist() == expected[:size]

    def test_numpy_batches_are_taken_only_where_nothing_can_be_lost(self, stage):
        import numpy as np

        prompts = np.array(["a", "b"], dtype=object)
        assert stage({"prompt": prompts, "n": np.array([1, 2])}).num_rows == 2
        assert stage({"prompt": prompts[:0]}).num_rows == 0
        assert (
            stage({"prompt": np.array([None, None], dtype=object)})["finish_reason"].to_pylist()
            == ["skipped"] * 2
        )
        for bad in (
            np.array([1.0, np.nan]),
            np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[s]"),
            np.array([[1], [2, 3]], dtype=object),
        ):
            with pytest.raises(ConfigError, match="batch_format"):
                stage({"prompt": prompts, "n": bad})

    def test_progress_is_reported_and_its_failure_harms_nothing(self, model):
        reports = []

        def report(worker, counts):
            reports.append((worker, counts))
            raise OSError("nobody listens")

        stage = BatchGenLLM(model, prompt_column="prompt", sampling=SETTINGS, progress=report, **OPTIONS)
        out = stage(pa.table({"prompt": ["a", None, ""]}))
        stage.close()
        assert out.num_rows == 3
        _, counts = reports[-1]
        assert counts["rows_done"] == 3
        assert counts["rows_failed"] == counts["rows_skipped"] == 1
        assert counts["generated_tokens"] == 6

    def test_a_conversation_column_needs_a_chat_template_before_the_weights_are_read(self, tmp_path):
        plain = tiny_checkpoint(tmp_path / "plain", "llama", chat_template=False)
        for weights in plain.glob("*.safetensors"):
            weights.write_bytes(b"not weights")
        with pytest.raises(ConfigError, match="chat template"):
            BatchGenLLM(str(plain), messages_column="messages")


def test_the_public_names_are_these():
    assert all(getattr(batchgen_data, name) is not None for name in batchgen_data.__all__)
    assert set(batchgen_data.__all__) == {
        "LLM",
        "BatchGenLLM",
        "BatchgenError",
        "CallbackError",
        "Callbacks",
        "CommitError",
        "ConfigError",
        "DeviceError",
        "EngineConfig",
        "InputError",
        "Int8KV",
        "InternalError",
        "JobError",
        "Outcome",
        "PlanError",
        "PromptError",
        "PromptLookup",
        "PromptSpec",
        "PromptTooLongError",
        "RowError",
        "SamplingParams",
        "UnsafeModelError",
        "generate",
    }


def test_the_runtime_needs_no_ray():
    import subprocess
    import sys

    code = "import sys; sys.modules['ray'] = None; import batchgen_data.llm, batchgen_data.operator"
    subprocess.run([sys.executable, "-c", code], check=True)
