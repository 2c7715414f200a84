"""Records: what was published for each shard, one small file each, and what they add up to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from batchgen_data.errors import CommitError
from batchgen_data.job.parts import PartFile
from batchgen_data.job.shards import Ranges, Shard, without
from batchgen_data.job.summary import RunSummary

RECORD_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """What one commit publishes. Written before it as its intent, and by it as the record.

    Attributes:
        generation: The lease under which it was written.
        shard_idx: The shard.
        round_idx: 0 for its first outcomes; higher where failed rows were tried again.
        rows: Rows of the input file that got outcomes here.
        failed_rows: Those of them that are in `errors`; the others are in `data`, in order.
        data: File of results; None in a later round that had none.
        errors: File of failed rows; None where there are none.
        retired: Path of an earlier errors file whose rows these are; it is taken away.
    """

    generation: int
    shard_idx: int
    round_idx: int
    rows: Ranges
    failed_rows: Ranges
    data: PartFile | None
    errors: PartFile | None
    retired: str | None

    @property
    def name(self) -> str:
        """Name of the record's file: sorts by shard, then round."""
        return f"{self.shard_idx:08d}-{self.round_idx}.json"

    @property
    def parts(self) -> list[PartFile]:
        """The files it publishes."""
        return [part for part in (self.data, self.errors) if part is not None]

    def encode(self) -> bytes:
        """Return the record as JSON with a checksum over the rest."""
        fields: dict[str, Any] = {
            "format": RECORD_FORMAT,
            "generation": self.generation,
            "shard": self.shard_idx,
            "round": self.round_idx,
            "rows": self.rows,
            "failed_rows": self.failed_rows,
            "data": self.data and self.data.to_dict(),
            "errors": self.errors and self.errors.to_dict(),
            "retired": self.retired,
        }
        return json.dumps({**fields, "checksum": _checksum(fields)}).encode() + b"\n"

    @classmethod
    def decode(cls, content: bytes, name: str) -> ShardRecord:
        """Return the record in `content`.

        Raises:
            CommitError: It is damaged or of an unknown format.
        """
        try:
            fields = json.loads(content)
            checksum = fields.pop("checksum")
            if checksum != _checksum(fields):
                raise ValueError("its checksum is wrong")
            if fields["format"] != RECORD_FORMAT:
                raise ValueError(f"its format {fields['format']} is unknown to this version")
            return cls(
                generation=fields["generation"],
                shard_idx=fields["shard"],
                round_idx=fields["round"],
                rows=_ranges(fields["rows"]),
                failed_rows=_ranges(fields["failed_rows"]),
                data=PartFile.from_dict(fields["data"]) if fields["data"] else None,
                errors=PartFile.from_dict(fields["errors"]) if fields["errors"] else None,
                retired=fields["retired"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommitError(f"the record {name} is damaged: {error}; see batchgen verify") from error


@dataclass(slots=True)
class ShardState:
    """What the records of one shard add up to.

    Attributes:
        records: In order of rounds.
        failed_rows: Rows whose outcome is an error.
        parts: Published files that stand.
    """

    records: list[ShardRecord]
    failed_rows: Ranges
    parts: list[PartFile]

    @property
    def summary(self) -> RunSummary:
        """Counts of its rows."""
        summary = RunSummary()
        for part in self.parts:
            summary.add_summary(part.counts)
        return summary

    @property
    def errors(self) -> PartFile | None:
        """The errors file that stands."""
        return next((part for part in self.parts if part.path.startswith("errors/")), None)

    @property
    def next_round(self) -> int:
        """Number of the round that would follow."""
        return self.records[-1].round_idx + 1


def add_up(records: Iterable[ShardRecord]) -> dict[int, ShardState]:
    """Fold records (sorted by name) into the state of each shard.

    Raises:
        CommitError: Records of one shard do not follow one another.
    """
    states: dict[int, ShardState] = {}
    for record in records:
        state = states.get(record.shard_idx)
        if state is None:
            if record.round_idx:
                raise CommitError(f"the first record of shard {record.shard_idx} is missing")
            states[record.shard_idx] = ShardState([record], record.failed_rows, record.parts)
            continue
        before = state.errors
        if record.round_idx != state.next_round or record.retired != (before and before.path):
            raise CommitError(f"the records of shard {record.shard_idx} do not follow one another")
        state.records.append(record)
        state.failed_rows = record.failed_rows
        state.parts = [part for part in state.parts if part.path != record.retired] + record.parts
    return states


def check_rows(shard: Shard, state: ShardState) -> str | None:
    """Return what is wrong with the rows that a shard's records name, None where each row is there once."""
    left: Ranges = shard.rows
    for record in state.records:
        if record.rows != left:
            return f"record {record.name} names rows {record.rows} in place of {left}"
        if without(record.failed_rows, record.rows):
            return f"record {record.name} names failed rows that are not its own"
        left = record.failed_rows
    return None


def _ranges(value: Any) -> Ranges:
    return tuple((int(first), int(end)) for first, end in value)


def _checksum(fields: dict[str, Any]) -> str:
    content = json.dumps(fields, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
