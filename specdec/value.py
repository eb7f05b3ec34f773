"""Values that are made many times in every round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[Class]) -> type[Class]:
    """A dataclass with slots, compared and hashed by its fields, that is frozen for the type checker alone: forbidding
    a change at run time too makes it four times as slow to make, and a round makes thirty of them."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
