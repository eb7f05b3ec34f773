"""What can be wrong with a model."""

from __future__ import annotations


class ModelRefused(Exception):
    """This model cannot be served right; the message is one line that names it, the reason and the cure."""
