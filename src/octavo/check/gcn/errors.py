"""Errors of the executor."""

from __future__ import annotations


class ExecutionError(RuntimeError):
    """The program did what real hardware would fault on or leave undefined; the text names the instruction."""


class UnsupportedInstruction(NotImplementedError):
    """An instruction, operand or modifier that the executor has no definition for; never skipped silently."""


class MemoryFault(ExecutionError):
    """An access outside every buffer of the launch, or outside the workgroup's LDS."""
