"""Ctrl-C and SIGTERM as a wish to stop at the end of a step, and at once if it comes twice."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Inside the block, the first SIGINT or SIGTERM makes the object true; the second raises
    ``KeyboardInterrupt``. Outside the main thread, where Python takes no signals, it never becomes true."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """As a shell has it: 130 after SIGINT, 143 after SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            # A signal that is ignored stays so: a shell ignores SIGINT for what it runs in the background.
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        text = f"\noctavo: {self.signal.name}: stopping after this step; again to stop at once\n"
        with contextlib.suppress(OSError):  # there may be no terminal any more
            os.write(
                2, text.encode()
            )  # to the descriptor: a handler may have interrupted a write to the stream
