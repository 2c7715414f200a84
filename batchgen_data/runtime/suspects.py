"""Sequences of a pass that raised: they run alone, oldest first, until the culprit is found."""

from __future__ import annotations

from bisect import insort

from batchgen_data.runtime.sequence import Sequence, State


class Suspects:
    """In order of arrival; each stays until a pass of it alone has succeeded or failed."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._sequences)

    @property
    def oldest(self) -> Sequence:
        """The one to run next; there is one."""
        return self._sequences[0]

    def idle(self) -> list[Sequence]:
        """Those without pages."""
        # A copy first: `statistics` is called from other threads.
        return [sequence for sequence in tuple(self._sequences) if sequence.state is not State.ACTIVE]

    def add(self, sequence: Sequence) -> None:
        """Suspect a sequence; one that is suspected already stays where it is."""
        if not sequence.suspect:
            sequence.suspect = True
            insort(self._sequences, sequence, key=lambda other: other.seq_id)

    def clear(self, sequence: Sequence) -> None:
        """Suspect a sequence no longer; one that is not suspected is left as it is."""
        if sequence.suspect:
            sequence.suspect = False
            self._sequences.remove(sequence)
