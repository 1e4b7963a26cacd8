"""Checks of compiled kernels that need no GPU: compile for a named target, inspect, execute AMD code objects.

`run` is what `octavo check` calls. `octavo.check.compile` compiles one kernel; `octavo.check.gcn` executes AMD code
objects on the CPU.
"""

from octavo.check.checks import run
from octavo.check.report import CheckReport

__all__ = ["CheckReport", "run"]
