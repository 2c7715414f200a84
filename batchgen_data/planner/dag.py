"""One layer as a graph of work: what runs where, what waits for what, and which chain sets the pace.

Resources (compute, copies, disk) work one node at a time, in the order given. Pure Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from batchgen_data.errors import InternalError


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A piece of work on one resource, which starts when those named in `after` have ended."""

    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """When a node runs, in seconds from the start of the layer, and which node it waited for last."""

    start_s: float
    end_s: float
    waited_for: str | None


class LayerGraph:
    """Nodes of one layer, scheduled.

    Args:
        nodes: those of one resource in the order they run; each names only nodes before it.

    Raises:
        InternalError: two nodes of one name, or a node that waits for one that does not come before it.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.spans: dict[str, Span] = {}
        last: dict[str, str] = {}
        for node in self.nodes:
            before = last.get(node.resource)
            waits = node.after if before is None else (*node.after, before)
            waited_for, start_s = None, 0.0
            for name in waits:
                span = self.spans.get(name)
                if span is None:
                    raise InternalError(f"node {node.name!r} of a layer waits for a later one, {name!r}")
                if waited_for is None or span.end_s > start_s:
                    waited_for, start_s = name, span.end_s
            if node.name in self.spans:
                raise InternalError(f"two nodes of a layer are named {node.name!r}")
            self.spans[node.name] = Span(start_s, start_s + node.seconds, waited_for)
            last[node.resource] = node.name

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((span.end_s for span in self.spans.values()), default=0.0)

    @property
    def critical_path(self) -> tuple[str, ...]:
        """Names of the chain of nodes without a gap that ends last, in order."""
        name = max(self.spans, key=lambda name: self.spans[name].end_s, default=None)
        path = []
        while name is not None:
            path.append(name)
            name = self.spans[name].waited_for
        return tuple(reversed(path))

    def busy_s(self, resource: str) -> float:
        """Seconds of work on one resource."""
        return sum(node.seconds for node in self.nodes if node.resource == resource)

    def draw(self, width: int = 100) -> str:
        """A chart with a line per node: a bar where it runs, marked where it is on the critical path."""
        if not self.nodes:
            return "(no work)"
        critical = set(self.critical_path)
        label_width = max(len(node.name) for node in self.nodes)
        resource_width = max(len(node.resource) for node in self.nodes)
        columns = max(10, width - label_width - resource_width - 17)
        scale = columns / (self.seconds or 1.0)
        lines = []
        for node in self.nodes:
            span = self.spans[node.name]
            first = min(int(span.start_s * scale), columns - 1)
            length = max(1, round(span.end_s * scale) - first)
            bar = ("#" if node.name in critical else "-") * min(length, columns - first)
            lines.append(
                f"{node.resource:{resource_width}}  {node.name:{label_width}} |{' ' * first}{bar}".ljust(
                    resource_width + label_width + 4 + columns
                )
                + f"|{node.seconds * 1e3:9.2f} ms"
            )
        return "\n".join(lines)
