"""Faster kernels behind PyTorch's own operators, in eager mode; model code stays as it is.

    octavo.operators.enable()                       # all operators, where a measurement says they win
    with octavo.operators.enabled("topk"): ...      # one, for a while
    octavo run script.py arguments                  # a program that cannot be edited

``status()`` says what was taken, what was refused, and why.
"""

from octavo.operators.norms import fuse_rms_norms
from octavo.operators.registry import (
    ENVIRONMENT,
    OPERATORS,
    OperatorStatus,
    disable,
    enable,
    enable_from_environment,
    enabled,
    reset_counts,
    status,
    why_not,
)
from octavo.operators.script import run_script

__all__ = [
    "ENVIRONMENT",
    "OPERATORS",
    "OperatorStatus",
    "disable",
    "enable",
    "enable_from_environment",
    "enabled",
    "fuse_rms_norms",
    "reset_counts",
    "run_script",
    "status",
    "why_not",
]
