from __future__ import annotations

import json
import logging
import pickle
from fractions import Fraction

import numpy as np
import pytest
from transformers import GenerationConfig

from batchgen_data.errors import ConfigError
from batchgen_data.sampling import (
    ResolvedSampling,
    SamplingParams,
    ignored_generation_settings,
    resolve,
    sources,
)

GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("temperature", True),
        ("presence_penalty", -(10**400)),
        ("seed", Fraction(10**400)),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {3: 10**400}),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", 0),
        ("max_tokens", float("inf")),
        ("min_tokens", -1),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("stop_token_ids", ["2"]),
        ("ignore_eos", 1),
        ("seed", 2**63),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: 1, "3": 2}),
        ("skip_special_tokens", "no"),
    ],
)
def test_a_value_out_of_range_names_the_field_and_the_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_beyond_every_range_are_refused_like_others(digits: int) -> None:
    for name in ("temperature", "top_p", "max_tokens", "seed", "stop_token_ids"):
        with pytest.raises(ConfigError, match=name):
            SamplingParams(**{name: 10**digits})
    with pytest.raises(ConfigError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[10**digits])


def test_values_are_normalised() -> None:
    params = SamplingParams(
        top_k=-1,
        max_tokens=16.0,
        stop="end",
        stop_token_ids=np.int64(7),
        logit_bias={"5": 1, 2: -3, 9: None},
        min_tokens=np.int32(2),
    )
    assert params.top_k == 0
    assert (params.max_tokens, type(params.max_tokens)) == (16, int)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (7,)
    assert params.logit_bias == ((2, -3.0), (5, 1.0))
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert SamplingParams().to_dict() == {}


def test_hugging_face_aliases() -> None:
    params = SamplingParams.from_dict(
        {"max_new_tokens": 5, "stop_strings": ["x"], "eos_token_id": [2, 7], "num_return_sequences": 1}
    )
    assert params == SamplingParams(max_tokens=5, stop=["x"], stop_token_ids=[2, 7])
    with pytest.raises(ConfigError, match="twice"):
        SamplingParams.from_dict({"max_new_tokens": 5, "max_tokens": 6})
    assert SamplingParams.from_dict({"max_new_tokens": 5, "max_tokens": None}).max_tokens == 5
    for name in ("n", "num_return_sequences"):
        with pytest.raises(ConfigError, match=r"only 1 .*a column that numbers the copies"):
            SamplingParams.from_dict({name: 2})


def test_do_sample_switches_between_greedy_and_the_models_temperature() -> None:
    assert SamplingParams.from_dict({"do_sample": False}) == GREEDY
    on = SamplingParams.from_dict({"do_sample": True})
    assert resolve(on, SamplingParams(temperature=0.6)).temperature == 0.6
    assert resolve(on, GREEDY).temperature == 1.0
    assert resolve(GREEDY.over(on), SamplingParams()).greedy
    assert (
        resolve(SamplingParams(temperature=0.3).over(SamplingParams(do_sample=False)), GREEDY).temperature
        == 0.3
    )
    for do_sample, temperature in ((False, 0.7), (True, 0)):
        with pytest.raises(ConfigError, match="contradicts"):
            SamplingParams(do_sample=do_sample, temperature=temperature)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": None})
    with pytest.raises(ConfigError, match="mapping"):
        SamplingParams.from_dict(["temperature"])  # type: ignore[arg-type]


def test_layers_row_over_job_over_model_over_built_in() -> None:
    row = SamplingParams(max_tokens=3)
    job = SamplingParams(max_tokens=9, top_p=0.5, seed=4)
    model = SamplingParams(temperature=0.6, top_k=20)
    settings = resolve(row.over(job), model)
    assert settings == ResolvedSampling(temperature=0.6, top_p=0.5, top_k=20, max_tokens=3, seed=4)
    origin = sources(job, model)
    assert (origin["top_p"], origin["top_k"], origin["min_p"]) == ("user", "model", "built-in")
    assert set(origin) == set(ResolvedSampling.__dataclass_fields__)
    assert sources(SamplingParams(do_sample=True), GREEDY)["temperature"] == "built-in"


def test_min_tokens_above_max_tokens_across_layers() -> None:
    with pytest.raises(ConfigError, match="min_tokens=5"):
        resolve(SamplingParams(max_tokens=4), SamplingParams(min_tokens=5))


@pytest.mark.parametrize("name, value", [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)])
def test_a_filter_that_greedy_decoding_would_ignore_is_refused(name: str, value: float) -> None:
    asked = SamplingParams(**{name: value})
    with pytest.raises(ConfigError, match=f"{name} would have no effect.*set temperature"):
        resolve(asked, GREEDY)
    assert not resolve(asked, SamplingParams()).greedy
    # Greedy on purpose: nothing is hidden, and equal requests compare equal.
    assert resolve(SamplingParams(temperature=0, **{name: value}), GREEDY) == ResolvedSampling(
        temperature=0.0
    )
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0}[name]
    assert resolve(SamplingParams(**{name: off}), GREEDY).greedy


def test_a_vanishing_temperature_is_greedy() -> None:
    assert resolve(SamplingParams(temperature=1e-9), SamplingParams()).greedy


def test_generation_config_defaults() -> None:
    read = SamplingParams.from_generation_config
    assert read(GenerationConfig()).temperature == 0.0
    assert read({}).to_dict() == {"temperature": 0.0}
    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2], "max_length": 20}
    for config in (given, GenerationConfig(**given)):
        params = read(config)
        assert (params.temperature, params.top_p) == (0.6, 0.9)
        assert params.stop_token_ids is None
        assert params.max_tokens is None
    assert read({"do_sample": True, "max_new_tokens": 5, "repetition_penalty": 1.1}) == SamplingParams(
        temperature=1.0, max_tokens=5, repetition_penalty=1.1
    )
    with pytest.raises(ConfigError, match="generation config: top_p"):
        read({"top_p": 3})


def test_stop_strings_of_a_generation_config_are_read() -> None:
    for config in ({"stop_strings": ["</s>", "User:"]}, GenerationConfig(stop_strings=["</s>", "User:"])):
        params = SamplingParams.from_generation_config(config)
        assert params.stop == ("</s>", "User:")
        assert resolve(SamplingParams(), params).stop == ("</s>", "User:")
        assert resolve(SamplingParams(stop="x"), params).stop == ("x",)
    assert SamplingParams.from_generation_config({"stop_strings": "end"}).stop == ("end",)


@pytest.mark.parametrize(
    "name, active, neutral",
    [
        ("no_repeat_ngram_size", 3, 0),
        ("suppress_tokens", [1, 2], []),
        ("begin_suppress_tokens", [1], None),
        ("bad_words_ids", [[1]], None),
        ("sequence_bias", [[[1], -5.0]], None),
        ("num_beams", 4, 1),
        ("penalty_alpha", 0.6, 0),
        ("typical_p", 0.9, 1.0),
        ("epsilon_cutoff", 3e-4, 0.0),
        ("eta_cutoff", 1e-3, 0.0),
        ("forced_bos_token_id", 0, None),
        ("forced_eos_token_id", 2, None),
        ("guidance_scale", 1.5, 1.0),
        ("min_length", 5, 0),
    ],
)
def test_what_a_generation_config_asks_for_in_vain_is_said_once(
    caplog: pytest.LogCaptureFixture, name: str, active: object, neutral: object
) -> None:
    read = SamplingParams.from_generation_config
    with caplog.at_level(logging.WARNING):
        for config in ({name: neutral}, {}, {"temperature": 0.5, "do_sample": True, "eos_token_id": 3}):
            read(config)
        assert caplog.records == []
        read({name: active})
    (record,) = caplog.records
    assert name in record.getMessage()
    assert ignored_generation_settings({name: active, "temperature": 1}) == {name: active}
    loaded = GenerationConfig(**{name: active})
    assert list(ignored_generation_settings(loaded)) == [name]
    assert json.dumps(ignored_generation_settings(loaded))
