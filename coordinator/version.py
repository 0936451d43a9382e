"""Which release this is."""

from __future__ import annotations

import importlib.metadata

DISTRIBUTION = "pd-coordinator"


def version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
