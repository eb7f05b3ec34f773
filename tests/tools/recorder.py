"""The metadata recorder as a dictionary."""

from __future__ import annotations

from scheduler.links import SequenceRecord


class MemoryRecorder:
    """Implements `scheduler.links.Recorder`. records: newest of each sequence; forgotten: its last one before."""

    def __init__(self) -> None:
        self.records: dict[str, SequenceRecord] = {}
        self.last: dict[str, SequenceRecord] = {}

    def record(self, record: SequenceRecord) -> None:
        self.records[record.sequence_id] = self.last[record.sequence_id] = record

    def forget(self, sequence_id: str) -> None:
        self.records.pop(sequence_id, None)
