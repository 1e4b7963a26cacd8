"""Execute compiled gfx942 and gfx950 kernels on the CPU; see README.md in this folder."""

import numpy as np

if int(np.__version__.split(".")[0]) < 2:
    raise ImportError(
        f"the executor of AMD code needs NumPy 2 (its rules for mixed integer types), found {np.__version__}: "
        "pip install 'numpy>=2'"
    )

from .errors import ExecutionError, MemoryFault, UnsupportedInstruction
from .launch import Report, launch
from .tracking import Race

__all__ = ["ExecutionError", "MemoryFault", "Race", "Report", "UnsupportedInstruction", "launch"]
