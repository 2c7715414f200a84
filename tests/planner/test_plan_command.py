"""``batchgen plan`` and plans at start-up, on tiny models: what is printed, recorded, and refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchgen_data import LLM, ConfigError, EngineConfig, PlanError, SamplingParams, cli
from batchgen_data.models.load import read_config, resolve_source
from batchgen_data.planner import advise, bandwidth, meta, timing
from batchgen_data.planner import profile as profile_module
from batchgen_data.planner.advise import plan_at_start
from batchgen_data.planner.cache import profile_path, save_profile
from batchgen_data.planner.cost import PassCosts, Profile
from batchgen_data.planner.meta import model_sizes
from batchgen_data.planner.plan import Plan
from batchgen_data.planner.profile import device_name
from batchgen_data.planner.roofline import Roofline
from batchgen_data.runtime.startup import plan_target
from planner_cases import layer_costs, profile
from tiny_models import FAMILIES, tiny_checkpoint, tiny_config, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", chat_template=True))


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Profiles are made up instead of measured, and kept in a folder of this test; says which."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    names: list[str] = []

    def made(config: Any, sizes: Any, *, notify: Any, **_: Any) -> Any:
        names.append(sizes.architecture)
        notify("a made-up profile")
        return profile(facts={"device": "made", "dtype": "float32", "threads": 1})

    monkeypatch.setattr(advise, "profile_model", made)
    return names


def test_a_plan_is_printed_and_its_profile_kept(
    folder: str, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "-m", folder, "--device-memory", "64MiB", "--host-memory", "32MiB"]
    arguments += ["--max-tokens", "20", "--num-threads", "1"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "LlamaForCausalLM, 0.000131 B parameters" in printed.out
    assert (
        "device memory 64.0 MiB, host memory 32.0 MiB; 512 rows of 256 prompt and 20 output tokens"
        in printed.out
    )
    assert re.search(
        r"^plan: +all weights on the device; .* of KV on the device; \d+ sequences", printed.out, re.M
    )
    assert re.search(r"^runner-up: ", printed.out, re.M)
    assert re.search(r"[\d.]+ tokens/s, .* in all; a pass of \d+ sequences takes", printed.out)
    assert "what would help most" in printed.out
    assert printed.err.splitlines() == ["measuring: a made-up profile"]
    assert cli.main([*arguments, "--explain"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert measured == ["LlamaForCausalLM"]
    assert re.search(r"compute +attention +\|#+", printed.out)
    assert "critical path: attention > MLP" in printed.out


def test_the_input_gives_the_lengths(
    folder: str, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"prompt": ["the cat", None, "a dog and the other one", "x"]}), "in.parquet")
    arguments = ["plan", "-m", folder, "--input", "in.parquet", "--prompt-column", "prompt", "--json"]
    assert cli.main([*arguments, "--max-tokens", "7"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["rows"] == 3
    assert re.match(
        r"3 rows of \d+ to \d+ prompt tokens \(median \d+\) and 7 output tokens each", record["workload"]
    )
    assert Plan(**{**record["plan"], "prediction": None}).max_sequences <= 4
    assert record["plan"]["prediction"]["bct_s"] > 0
    assert record["options"]["max_sequences"] == record["plan"]["max_sequences"]
    assert record["helps"]
    assert record["sizes"]["weights_bytes"] > 0


def test_options_of_a_run_are_kept(
    folder: str, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "-m", folder, "--json", "--max-sequences", "8", "--kv-memory", "4MiB"]
    assert cli.main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["max_sequences"], plan["kv_memory"]) == (8, 4 * 2**20)
    assert cli.main([*arguments, "--attention-sub-batch", "2", "--moe-batch-tokens", "4"]) == 0
    record = json.loads(capsys.readouterr().out)
    plan, options = record["plan"], record["options"]
    assert (plan["attention_sub_batch"], plan["moe_batch_tokens"]) == (2, 4)
    # A dense model combines where it is told to, so the plan says where.
    assert options["yield_at"] == ["model.layers.*.mlp"]
    assert plan["prediction"]["step_sequences"] == 8
    with LLM(folder, num_threads=1, max_context_tokens=64, **options) as llm:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        assert {one.finish_reason for one in llm.generate(["the cat", "a dog"] * 3, sampling)} == {"length"}
        assert llm.statistics()["coroutine"]["combines"] > 0


@pytest.mark.parametrize(
    "given, message",
    [
        (["--device-memory", "lots"], r"device_memory must be a size"),
        (
            ["--device-memory", "64KiB"],
            r"LlamaForCausalLM does not fit: .*needs [\d,]+ bytes.*there are 65,536;",
        ),
        (["--device-memory", "4MiB", "--kv-memory", "1GiB"], r"no plan .*kv_memory=1073741824"),
        (["--device", "gpu"], r"unknown device 'gpu'"),
        (["--input", "absent.parquet", "--prompt-column", "prompt"], r"input absent\.parquet does not exist"),
        (["--input", "in.parquet"], r"exactly one of prompt_column"),
        (["--input", "nulls.parquet", "--prompt-column", "prompt"], r"no row of the input has a prompt"),
        (["--inputs", "x"], r"No such option: --inputs; did you mean '--input'"),
        (["stray.parquet"], r".*unexpected extra argument"),
    ],
)
def test_what_cannot_be_planned_exits_2_before_anything_is_measured(
    folder: str, measured: list[str], capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    pq.write_table(pa.table({"prompt": ["one"]}), "in.parquet")
    pq.write_table(pa.table({"prompt": pa.array([None], pa.string())}), "nulls.parquet")
    assert cli.main(["plan", "-m", folder, *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.match(f"error: .*{message}", printed.err.splitlines()[-1])


def test_an_unknown_model_exits_2(measured: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "-m", "./models/none"]) == 2
    assert "./models/none" in capsys.readouterr().err


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sizes_from_the_config_are_those_of_the_model(family: str) -> None:
    model = tiny_model(family)
    sizes = model_sizes(tiny_config(family), torch.float32, 1024)
    assert sizes.weights_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert sizes.num_layers == model.config.num_hidden_layers
    assert sizes.kv_token_bytes == sum(shape.token_bytes for shape in meta.layer_shapes(model).values())
    assert sizes.least_weights_bytes <= sizes.weights_bytes


def test_the_defaults_stay_where_everything_fits(folder: str, measured: list[str]) -> None:
    source = resolve_source(folder)
    assert plan_at_start(plan_target(source, EngineConfig())) == Plan()
    assert measured == []


def test_a_model_larger_than_the_machine_is_measured_and_streamed_or_refused(
    folder: str, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_context_tokens=64, page_tokens=16, max_sequences=64)
    target = plan_target(resolve_source(folder), config)
    free = 150 * 2**20
    monkeypatch.setattr(advise, "free_memory_bytes", lambda _: free)
    sizes = model_sizes(read_config(target.source)[1], torch.float32, 64)
    assert plan_at_start(target) == Plan(max_sequences=64)
    # As if each layer were 40 MiB.
    big = dataclasses.replace(
        sizes,
        layers=tuple(dataclasses.replace(layer, core_bytes=40 * 2**20) for layer in sizes.layers),
    )
    monkeypatch.setattr(advise, "model_sizes", lambda *_: big)
    monkeypatch.setattr(advise, "_SMALL_SHARE", 10**6)
    for _ in range(2):
        plan = plan_at_start(target)
        assert plan.basis == "profile"
        assert plan.max_sequences == 64
        assert plan.weights_memory is not None
        assert plan.prediction is not None
        assert plan.prediction.device_bytes <= free
    # Kept by the first.
    assert measured == ["LlamaForCausalLM"]
    free = 2**20
    with pytest.raises(PlanError, match=r"does not fit.*there are [\d,]+"):
        plan_at_start(target)


def test_a_model_that_cannot_be_measured_is_streamed_by_rule(
    folder: str, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_context_tokens=64, page_tokens=16, max_sequences=4)
    target = plan_target(resolve_source(folder), config)
    monkeypatch.setattr(advise, "free_memory_bytes", lambda _: 150 * 2**20)
    monkeypatch.setattr(advise, "_SMALL_SHARE", 10**6)
    sizes = model_sizes(read_config(target.source)[1], torch.float32, 64)
    layers = tuple(dataclasses.replace(layer, core_bytes=40 * 2**20) for layer in sizes.layers)
    big = dataclasses.replace(sizes, layers=layers)
    monkeypatch.setattr(advise, "model_sizes", lambda *_: big)

    def full(*_: Any, **__: Any) -> None:
        raise PlanError("measuring needs more")

    monkeypatch.setattr(advise, "profile_model", full)
    plan = plan_at_start(target)
    assert (plan.basis, plan.max_sequences) == ("rules", 4)
    assert plan.weights_memory is not None
    assert plan.weights_memory < big.weights_bytes


def test_a_kept_profile_is_searched_at_start(folder: str, measured: list[str]) -> None:
    source = resolve_source(folder)
    # Up to thousands of tokens a pass takes the same time: more rows at once are all the better.
    costs = PassCosts({"dense": layer_costs(knee=4096.0)}, Roofline(fixed_s=1e-3))
    free_rows = profile(together=costs)
    path = profile_path(Path(folder), device_name(CPU), str(torch.float32), 1)
    save_profile(free_rows, path)
    plan = plan_at_start(plan_target(source, EngineConfig(num_threads=1)))
    assert plan.basis == "profile"
    assert plan.max_sequences == 512
    assert plan.prediction is not None
    assert plan.kv_memory is None
    given = EngineConfig(num_threads=1, max_sequences=16)
    assert plan_at_start(plan_target(source, given)).max_sequences == 16
    for options in ({"kv_memory": "4MiB"}, {"kv_memory_fraction": 0.5}, {"weights_memory": 5}):
        config = EngineConfig.from_options({"num_threads": 1, **options})
        assert plan_at_start(plan_target(source, config)).basis == "given"
    assert measured == []


def test_the_record_of_an_engine_has_its_plan(folder: str, measured: list[str]) -> None:
    options = {"num_threads": 1, "max_context_tokens": 64}
    with LLM(folder, **options) as llm:
        recorded = llm.record(SamplingParams())["plan"]
        assert recorded["basis"] == "defaults"
        assert recorded["max_sequences"] == 256
        assert (
            llm.generate(["the cat"], SamplingParams(max_tokens=3, ignore_eos=True))[0].finish_reason
            == "length"
        )
    with LLM(folder, **options, kv_memory="4MiB", max_sequences=8) as llm:
        recorded = llm.record(SamplingParams())["plan"]
        assert (recorded["basis"], recorded["kv_memory"]) == ("given", 4 * 2**20)
        assert recorded["max_sequences"] == llm.statistics()["max_sequences"] == 8


def test_a_tiny_model_is_measured(sparse_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real profile, of few and small passes: every kind of layer has costs above 0."""
    monkeypatch.setattr(profile_module, "_DECODING", (1, 4, 32))
    monkeypatch.setattr(profile_module, "_DECODING_LONG", (4,))
    monkeypatch.setattr(profile_module, "_PREFILLS", (32, 64))
    monkeypatch.setattr(profile_module, "_CONTEXTS", (16, 64))
    monkeypatch.setattr(profile_module, "_SECONDS", 0.1)
    monkeypatch.setattr(timing, "_LEAST_ROUNDS", 1)
    monkeypatch.setattr(bandwidth, "_COPY_BYTES", 2**20)
    monkeypatch.setattr(profile_module, "_MOST_KV_BYTES", 2**20)
    source = resolve_source(sparse_folder)
    config = read_config(source)[1]
    sizes = model_sizes(config, torch.float32, 256)
    measured = profile_module.profile_model(
        config, sizes, device=CPU, dtype=torch.float32, num_threads=2, folder=Path(sparse_folder)
    )
    assert Profile.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    assert measured.streamed_mlp is not None
    assert measured.streamed_mlp.seconds(4, experts_hit=8) > 0
    for costs in (measured.together, measured.lanes):
        assert costs is not None
        assert set(costs.layers) == {"sparse"}
        assert costs.layers["sparse"].attention.seconds(4, kv_tokens=100) > 0
        assert costs.layers["sparse"].mlp.seconds(4, experts_hit=8) > 0
        assert costs.rest.seconds(4, tokens=4) > 0
    assert 1e6 < measured.copy_bytes_s < 1e13
    assert 1e6 < measured.disk_bytes_s < 1e15
    assert measured.facts["architecture"] == "Qwen3MoeForCausalLM"


def test_a_context_beyond_the_model_is_refused(folder: str, measured: list[str]) -> None:
    with pytest.raises(ConfigError, match="more than the model's context"):
        plan_at_start(plan_target(resolve_source(folder), EngineConfig(max_context_tokens=10**6)))
