"""How much memory a run has needed at most."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch


def reset_peak(device: torch.device) -> None:
    """Starts a new peak, where the system lets a process do so."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is resident now


def peak(device: torch.device) -> int:
    """Bytes of tensors on a GPU, or resident bytes of the whole process on a CPU, at the highest."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
