"""Plans, rules and profiles as values: JSON, options, what the caller set."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_data.config import EngineConfig
from batchgen_data.errors import ConfigError, PlanError
from batchgen_data.planner.cache import load_profile, profile_path, save_profile
from batchgen_data.planner.cost import Profile
from batchgen_data.planner.plan import Plan, Prediction, as_options, as_size
from batchgen_data.planner.rules import Memory, budget_of, plan_by_rules
from planner_cases import GIB, MIB, profile, sizes

COUNTS = st.integers(1, 1000)
SIZES = st.integers(1, 2**40)
PLANS = st.builds(
    lambda **fields: Plan(**fields if fields["kv_residence"] == "host" else {**fields, "host_memory": None}),
    basis=st.sampled_from(("profile", "rules", "defaults")),
    weights_memory=st.none() | SIZES,
    kv_residence=st.sampled_from(("device", "host")),
    kv_memory=st.none() | SIZES,
    host_memory=st.none() | SIZES,
    attention_sub_batch=st.none() | COUNTS,
    moe_batch_tokens=st.none() | COUNTS,
    yield_at=st.none() | st.just(("model.layers.*.mlp",)),
    max_sequences=COUNTS,
    max_step_tokens=st.integers(1000, 10_000),
    prediction=st.none()
    | st.builds(
        Prediction,
        bct_s=st.floats(0, 1e6),
        tokens_per_s=st.floats(0, 1e6),
        step_s=st.floats(0, 1e3),
        step_sequences=COUNTS,
        device_bytes=SIZES,
        host_bytes=SIZES,
    ),
)


@given(PLANS)
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@given(PLANS)
def test_every_plan_is_a_valid_config(plan: Plan) -> None:
    config = EngineConfig.from_options(plan.to_options())
    assert plan.apply(EngineConfig()) == config
    assert (config.max_sequences, config.kv_residence) == (plan.max_sequences, plan.kv_residence)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 0}', '{"format": 1, "prediction": null, "x": 1}']
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="plan"):
        Plan.from_json(text)


def test_what_the_caller_set_is_kept() -> None:
    plan = Plan(max_sequences=64, kv_memory=10 * MIB, attention_sub_batch=8)
    config = plan.apply(EngineConfig(max_sequences=32, num_threads=2))
    assert (config.max_sequences, config.kv_memory, config.attention_sub_batch) == (32, 10 * MIB, 8)
    assert config.num_threads == 2


def test_options_of_the_command_line() -> None:
    assert as_options(Plan()) == ""
    assert as_options(Plan(weights_memory=5, kv_residence="host")) == "--weights-memory 5 --kv-residence host"
    assert as_options(Plan(yield_at=("a.*.mlp", "b"))) == "--yield-at 'a.*.mlp' --yield-at b"


@pytest.mark.parametrize(
    "size, text", [(5, "5 B"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB"), (2**52, "4096.0 TiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert as_size(size) == text


def test_rules_keep_the_defaults_where_everything_fits() -> None:
    for plan in (Plan(), Plan(max_sequences=32)):
        assert plan_by_rules(sizes(), Memory(free_bytes=16 * GIB, shared=True), plan, page_tokens=64) == plan


def test_rules_stream_weights_that_do_not_fit_within_the_budget() -> None:
    model = sizes()
    memory = Memory(free_bytes=600 * MIB)
    plan = plan_by_rules(model, memory, Plan(), page_tokens=64)
    assert plan.basis == "rules"
    assert plan.weights_memory is not None
    assert plan.kv_memory is not None
    assert model.least_weights_bytes <= plan.weights_memory < model.weights_bytes
    room = model.pass_bytes(plan.max_sequences, plan.max_step_tokens)
    assert plan.weights_memory + plan.kv_memory + room <= budget_of(model, memory).device_bytes
    assert plan.kv_memory >= 2 * 64 * model.kv_token_bytes


def test_rules_refuse_what_runs_in_no_way_before_anything_is_loaded() -> None:
    with pytest.raises(PlanError, match=r"needs [\d,]+ bytes.*there are [\d,]+; give at least"):
        plan_by_rules(sizes(), Memory(free_bytes=100 * MIB), Plan(), page_tokens=64)


def test_a_given_device_memory_is_the_budget() -> None:
    assert budget_of(sizes(), Memory(free_bytes=GIB, shared=True), 3 * GIB).device_bytes == 3 * GIB


def test_profiles_are_kept_by_what_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = profile_path(model, "cpu", "float32", 2)
    assert path.parent == tmp_path / "batchgen" / "profiles"
    assert load_profile(path) is None
    measured = profile(facts={"device": "made"})
    save_profile(measured, path)
    assert load_profile(path) == measured
    assert [file.suffix for file in path.parent.iterdir()] == [".json"]
    others = [
        profile_path(model, "gpu", "float32", 2),
        profile_path(model, "cpu", "bfloat16", 2),
        profile_path(model, "cpu", "float32", 1),
    ]
    (model / "config.json").write_text('{"x": 1}')
    others.append(profile_path(model, "cpu", "float32", 2))
    assert len({path, *others}) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 0}'])
def test_a_damaged_profile_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert load_profile(path) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    save_profile(profile(), tmp_path / "file" / "profile.json")


def test_profile_round_trip_with_lanes() -> None:
    made = profile()
    made = dataclasses.replace(made, lanes=made.together, lane_tokens=32)
    assert Profile.from_dict(json.loads(json.dumps(made.to_dict()))) == made
