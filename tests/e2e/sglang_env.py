"""SGLang, to import its request models: half a minute and 230 MB. What they import of IPython needs traitlets alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e import packages, vllm_env

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("sglang==0.5.23", "ipython==9.18.1", "traitlets==5.16.1")


def ensure(version: str = vllm_env.DEFAULT_VERSION) -> Path:
    return packages.ensure("sglang", PACKAGES, version)
