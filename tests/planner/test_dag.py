"""Schedules and critical paths of graphs made by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_data.errors import InternalError
from batchgen_data.planner.dag import LayerGraph, Node


def test_one_resource_runs_one_after_another() -> None:
    graph = LayerGraph([Node("a", "compute", 1.0), Node("b", "compute", 2.0)])
    assert graph.seconds == 3.0
    assert graph.critical_path == ("a", "b")


def test_resources_overlap_and_the_longer_one_sets_the_pace() -> None:
    graph = LayerGraph([Node("compute", "compute", 1.0), Node("weights", "disk", 4.0)])
    assert graph.seconds == 4.0
    assert graph.critical_path == ("weights",)
    assert graph.busy_s("disk") == 4.0


def test_two_buffers_pipeline() -> None:
    """Copy 2 and 3 hide behind attention 1 and 2 (a copy is shorter), the experts wait for all."""
    graph = LayerGraph(
        [
            Node("attention 1", "compute", 3.0),
            Node("KV in 2", "copy", 2.0),
            Node("attention 2", "compute", 3.0, ("KV in 2",)),
            Node("KV in 3", "copy", 2.0, ("attention 1",)),
            Node("attention 3", "compute", 3.0, ("KV in 3",)),
            Node("experts", "compute", 5.0, ("attention 3",)),
        ]
    )
    assert graph.seconds == 14.0
    assert graph.critical_path == ("attention 1", "attention 2", "attention 3", "experts")
    assert (graph.spans["KV in 3"].start_s, graph.spans["KV in 3"].end_s) == (3.0, 5.0)


def test_slow_copies_are_the_critical_path() -> None:
    graph = LayerGraph(
        [
            Node("attention 1", "compute", 1.0),
            Node("KV in 2", "copy", 5.0),
            Node("attention 2", "compute", 1.0, ("KV in 2",)),
            Node("KV in 3", "copy", 5.0, ("attention 1",)),
            Node("attention 3", "compute", 1.0, ("KV in 3",)),
        ]
    )
    assert graph.seconds == 11.0
    assert graph.critical_path == ("KV in 2", "KV in 3", "attention 3")


def test_an_empty_layer_takes_no_time() -> None:
    graph = LayerGraph([])
    assert (graph.seconds, graph.critical_path, graph.draw()) == (0.0, (), "(no work)")


@pytest.mark.parametrize(
    "nodes",
    [
        [Node("a", "compute", 1.0), Node("a", "disk", 1.0)],
        [Node("a", "compute", 1.0, ("b",)), Node("b", "compute", 1.0)],
        [Node("a", "compute", 1.0, ("a",))],
    ],
)
def test_bad_graphs_are_bugs(nodes: list[Node]) -> None:
    with pytest.raises(InternalError):
        LayerGraph(nodes)


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.sampled_from([node.name for node in nodes]))) if nodes else set()
        resource = draw(st.sampled_from(("compute", "copy", "disk")))
        nodes.append(Node(f"n{number}", resource, draw(st.floats(0.1, 10.0)), tuple(sorted(after))))
    return nodes


@given(graphs())
def test_every_schedule_is_right_and_its_critical_path_has_no_gap(nodes: list[Node]) -> None:
    graph = LayerGraph(nodes)
    spans = graph.spans
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        assert spans[node.name].end_s == pytest.approx(spans[node.name].start_s + node.seconds)
        assert all(spans[name].end_s <= spans[node.name].start_s for name in node.after)
    for resource in ("compute", "copy", "disk"):
        own = [spans[node.name] for node in nodes if node.resource == resource]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
        assert graph.busy_s(resource) <= graph.seconds * (1 + 1e-9)
    path = graph.critical_path
    assert graph.seconds == pytest.approx(sum(by_name[name].seconds for name in path))


def test_the_drawing_marks_the_critical_path_and_keeps_to_its_width() -> None:
    graph = LayerGraph([Node("attention", "compute", 1.0), Node("weights", "disk", 4.0)])
    lines = graph.draw(width=60).splitlines()
    assert len(lines) == 2
    assert all(len(line) <= 60 for line in lines)
    assert "-" in lines[0]
    assert "#" not in lines[0]
    assert lines[1].count("#") > 3 * lines[0].count("-")
    assert lines[1].endswith("4000.00 ms")
