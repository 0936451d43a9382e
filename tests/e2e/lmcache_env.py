"""LMCache: some seconds and 120 MB. On a CPU its transfers are torch's own, and what they import is here too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e import packages, vllm_env

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("lmcache==0.5.6", "nvtx==0.2.17", "redis==8.1.0", "sortedcontainers==2.4.0")


def ensure(version: str = vllm_env.DEFAULT_VERSION) -> Path:
    return packages.ensure("lmcache", PACKAGES, version)
