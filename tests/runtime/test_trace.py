"""The record of spans: bounded, from any thread, in a format that trace viewers read."""

from __future__ import annotations

import json
import threading

import pytest

from batchgen_data.runtime.trace import OFF, Trace


def spans(path):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_spans_come_back_with_their_track_times_and_arguments(tmp_path):
    trace = Trace()
    with trace.span("pass", "passes", tokens=7):
        trace.add("sub-batch 0", "sub-batches", trace._began_s + 1.0, trace._began_s + 1.5, until="layer")
    trace.write(tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    tracks = {
        event["args"]["name"]: event["tid"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    by_name = {event["name"]: event for event in spans(tmp_path / "out.json")}
    assert list(tracks) == ["sub-batches", "passes"]
    assert by_name["pass"]["tid"] == tracks["passes"]
    assert by_name["pass"]["args"] == {"tokens": 7}
    assert by_name["pass"]["dur"] > 0
    inner = by_name["sub-batch 0"]
    assert inner["tid"] == tracks["sub-batches"]
    assert inner["ts"] == pytest.approx(1e6)
    assert inner["dur"] == pytest.approx(0.5e6)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "nothing half written is left"


def test_a_span_is_recorded_when_its_block_raises():
    trace = Trace()
    with pytest.raises(ValueError, match="no"), trace.span("pass", "passes"):
        raise ValueError("no")
    assert [span[0] for span in trace._spans] == ["pass"]


def test_only_the_first_passes_are_recorded(tmp_path):
    trace = Trace(most_passes=2)
    for number in range(5):
        trace.begin_pass()
        with trace.span(f"pass {number}", "passes"):
            pass
    assert not trace.on
    trace.write(tmp_path / "out.json")
    assert [event["name"] for event in spans(tmp_path / "out.json")] == ["pass 0", "pass 1"]


def test_the_number_of_spans_is_bounded_too():
    trace = Trace(most_spans=3)
    for number in range(10):
        trace.add(f"read {number}", "weights", 0.0, 1.0)
    assert [span[0] for span in trace._spans] == ["read 0", "read 1", "read 2"]
    assert not trace.on


def test_a_trace_that_is_off_keeps_nothing(tmp_path):
    OFF.begin_pass()
    with OFF.span("pass", "passes", tokens=1):
        OFF.add("read", "weights", 0.0, 1.0)
    OFF.write(tmp_path / "out.json")
    assert spans(tmp_path / "out.json") == []


def test_threads_add_at_once():
    trace = Trace()

    def add(track):
        for number in range(500):
            with trace.span(str(number), track):
                pass

    threads = [threading.Thread(target=add, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        names = [span[0] for span in trace._spans if span[1] == f"thread {number}"]
        assert names == [str(at) for at in range(500)]


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "out.json").mkdir()
    with pytest.raises(OSError):
        Trace().write(tmp_path / "out.json")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
