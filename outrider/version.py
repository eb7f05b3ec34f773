"""The one place that holds the package's version. Imports nothing, so that the build can read it."""

from __future__ import annotations

__version__ = "0.1.0"
