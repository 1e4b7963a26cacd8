"""Which TorchTitan and PyTorch this integration was written for and tried with."""

from __future__ import annotations

import importlib.metadata
import re

TORCHTITAN = ((0, 3), (0, 4))
"""From, up to and without: the override seam and the names it reaches are those of 0.3."""
TORCH = (2, 14)
"""What TorchTitan 0.3 needs: it does not import on 2.11, and its default backend needs 2.14."""


def check(torchtitan: str | None = None, torch: str | None = None) -> None:
    """Refuse versions outside of the supported ones; the installed ones by default.

    Raises:
        ImportError: with what was found and what to install. TorchTitan shows it beside the override's name.
    """
    torchtitan = _installed("torchtitan") if torchtitan is None else torchtitan
    torch = _installed("torch") if torch is None else torch
    low, high = TORCHTITAN
    if not low <= _pair(torchtitan) < high:
        raise ImportError(
            f"octavo.integrations.torchtitan works with TorchTitan {low[0]}.{low[1]}.x and found {torchtitan}: "
            "pip install 'torchtitan==0.3.0'"
        )
    if _pair(torch) < TORCH:
        raise ImportError(
            f"TorchTitan {torchtitan} needs PyTorch {TORCH[0]}.{TORCH[1]} or newer and found {torch}: "
            "pip install 'torch>=2.14'"
        )


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _pair(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
