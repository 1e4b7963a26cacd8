"""Errors that the command line turns into one line."""

from __future__ import annotations


class UserError(ValueError):
    """Something asked for cannot be done. The message is one line: what was got, and what to do about it."""
