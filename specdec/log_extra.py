"""What a log line about one sequence carries beside its words: `extra=about(...)`."""

from __future__ import annotations

PRIVATE = "private"


def about(sequence_id: str, traceparent: str = "", private: bool = False) -> dict[str, object]:
    """private: what raised may hold parts of a request, so its message is only for those who asked for content."""
    return {"sequence_id": sequence_id, "traceparent": traceparent, PRIVATE: private}
