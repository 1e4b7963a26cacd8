"""Execute compiled gfx942 and gfx950 kernels on the CPU; see README.md in this folder."""

from .errors import ExecutionError, MemoryFault, UnsupportedInstruction
from .launch import Report, launch
from .tracking import Race

__all__ = ["ExecutionError", "MemoryFault", "Race", "Report", "UnsupportedInstruction", "launch"]
