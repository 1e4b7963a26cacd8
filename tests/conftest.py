"""What every test shares: hypothesis profiles, a limit of memory, signals, and GPU tests skipped without a GPU."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, settings

# A shared machine can be slow, so no deadline; in CI the same examples are tried every time.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("local", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "local"))

# A test that asks for far too much fails by its own name; without a limit the system ends some process
# of the run, and what is left of it can wait for that one forever.
MEMORY_LIMIT = 8 * 2**30
if not torch.cuda.is_available():  # a GPU's driver reserves more address space than that
    _, _hard = resource.getrlimit(resource.RLIMIT_DATA)
    _limit = MEMORY_LIMIT if _hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, _hard)
    resource.setrlimit(resource.RLIMIT_DATA, (_limit, _hard))

# A shell ignores SIGINT for what it runs in the background, and children inherit that: tests of signals would then
# wait for one that never comes.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where CUDA is not available."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU and torch sees none"))


@pytest.fixture
def octavo(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `octavo ARGUMENTS` in this process: exit status, standard output, standard error."""
    from octavo import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run
