"""The only file that touches PyTorch's dispatcher: puts kernels behind existing operators and takes them away.

Nothing is registered before the first ``enable``. Then each overload of an operator gets one router, once; afterwards
``enable`` and ``disable`` only set a flag that the router reads, since registering again while other threads call
crashes PyTorch. A router asks the gate, then the measured table, and calls either our kernel or the one that was there
before, with the same arguments: what is refused behaves as if nothing were registered, errors included. PyTorch's own
``torch._native`` overrides may be switched before or after ours; if the kernel captured here was one of theirs and is
gone, the one below it is captured instead.

A router is a Python function, or ``router.cpp`` where that was built (``octavo.operators.native``): it refuses most
calls itself and asks the Python function about the others. Either way a route's flags decide, and its counts tell.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.operators import native, wins
from octavo.operators.override import Override

OPERATORS = {
    "topk": "octavo.operators.topk",
    "rms_norm": "octavo.operators.rms_norm",
    "attention": "octavo.operators.attention",
    "gemm": "octavo.operators.gemm",
}
"""Names that ``enable`` takes, and the module that holds each one's OVERRIDES.

A module that needs more has ``prepare()``, called once, ``turned(enabled, forced)``, called with every change of the
switch, and ``counted()`` and ``reset()`` for what it serves beside the overrides.
"""

MEASURED = (
    "topk",
    "rms_norm",
    "rms_norm_backward",
    "attention",
    "attention_backward",
    "scaled_mm",
    "grouped_mm",
    "scaled_grouped_mm",
    "mixed_mm",
    "mm",
)
"""Names in the tables of wins: an operator's forward and backward win or lose apart."""

ENVIRONMENT = "OCTAVO_OPERATORS"
"""Names for ``octavo run`` to switch on, separated by commas; ``all`` for all."""


@dataclass(frozen=True)
class OperatorStatus:
    """What happened to the calls of one overload since the process started.

    Args:
        overload: e.g. ``"aten::topk"``, or ``"inductor::mm"`` for choices that torch.compile was offered.
        enabled: whether its calls are considered at present.
        forced: whether calls without a measurement are taken.
        taken: calls that Octavo's kernel served.
        refused: calls that went to PyTorch's kernel while enabled, by reason.
        table: the run behind the table of measured wins, per architecture of the process's devices; empty if none.
        router: ``"c++"`` if the compiled router serves it, ``"inductor"`` for choices, else ``"python"``.
    """

    overload: str
    enabled: bool
    forced: bool
    taken: int
    refused: dict[str, int]
    table: dict[str, str]
    router: str


@dataclass
class _Switch:
    """State of an operator that its routers read."""

    enabled: bool = False
    forced: bool = False
    routes: list[_Route] = field(default_factory=list)
    module: Any = None

    def hook(self, name: str, *args: Any) -> Any:
        """Call what the operator's module has under this name, if anything."""
        return getattr(self.module, name, lambda *_: None)(*args)

    def turn(self, enabled: bool, forced: bool) -> None:
        """Set the state, here and in compiled routers."""
        self.enabled, self.forced = enabled, forced
        for route in self.routes:
            if route.native is not None:
                route.native.switch(enabled, forced)
        self.hook("turned", enabled, forced)


@dataclass(frozen=True)
class _NoKernel:
    overload: str
    key: str

    def call_boxed(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"PyTorch has no {self.key} kernel of {self.overload}")


class _Route:
    """One overload at one dispatch key: the router, what it falls back to, and its counts."""

    def __init__(self, override: Override, key: str, switch: _Switch) -> None:
        self.override = override
        self.key = key
        self.switch = switch
        self.taken = 0
        self.refused: collections.Counter[str] = collections.Counter()
        self.lock = threading.Lock()
        self.native: native.NativeRoute | None = None
        library = None if override.filter is None else native.load()
        if library is None:
            self.install()
        else:
            self.native = native.NativeRoute(library, override, key, self.answer)
            wins.on_reload(self.native.forget)

    def _present_kernel(self) -> Any:
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(self.override.overload, self.key):
            return _NoKernel(self.override.overload, self.key)
        return torch.library.get_kernel(self.override.overload, self.key)

    def install(self) -> None:
        """Capture the present kernel and register the Python router above it."""
        self.original = self._present_kernel()
        self.library = torch.library.Library("aten", "IMPL")
        name = self.override.overload.removeprefix("aten::")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel")
            self.library.impl(name, self.route, self.key, with_keyset=True)

    def _refuses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Ask the gate, then the table; counts the answer."""
        override = self.override
        reason = override.why_not(*args, **kwargs)
        if reason is None and not self.switch.forced:
            reason = override.measured(*args, **kwargs)
        with self.lock:
            if reason is None:
                self.taken += 1
            else:
                self.refused[reason] += 1
        return reason is not None

    def route(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """The Python router: serve one call."""
        if self.switch.enabled and not self._refuses(args, kwargs):
            return self.override.run(*args, **kwargs)
        return self._call_original(keyset, args, kwargs)

    def answer(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """What the compiled router asks about a call: serve it, or refuse."""
        route, found = self.native, self.override.filter
        assert route is not None
        assert found is not None
        decides = args[found.tensor]
        route.learn(decides.device)
        if not self._refuses(args, kwargs):
            return self.override.run(*args, **kwargs)
        route.refuse()
        return (decides,) * route.returns

    def _call_original(
        self, keyset: torch._C.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        original = self.original
        try:
            return original.call_boxed(keyset, *args, **kwargs)
        except RuntimeError as error:
            if "SafeKernelFunction has been invalidated" not in str(error):
                raise
        with self.lock:
            if self.original is original:
                self.library._destroy()
                self.install()
        return self.original.call_boxed(keyset, *args, **kwargs)

    def counts(self) -> tuple[int, dict[str, int]]:
        """Calls taken, and refused by reason."""
        with self.lock:
            refused = collections.Counter(self.refused)
            taken = self.taken
        if self.native is not None:
            refused.update(self.native.refused())
        return taken, dict(refused)

    def reset(self) -> None:
        """Start the counts again."""
        with self.lock:
            self.taken = 0
            self.refused.clear()
        if self.native is not None:
            self.native.reset()


_switches: dict[str, _Switch] = {}
_lock = threading.RLock()


def _names(operators: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in operators if name not in OPERATORS]
    if unknown:
        raise ValueError(f"unknown operator {unknown[0]!r}; choose from {', '.join(OPERATORS)}")
    return operators or tuple(OPERATORS)


def _switch(name: str, force: bool = False) -> _Switch:
    """The operator's switch, with its routers registered: all of them, or those that may be asked for anything."""
    with _lock:
        switch = _switches.get(name)
        first = switch is None
        if switch is None:
            switch = _switches[name] = _Switch()
        # PyTorch registers GPU kernels of both vendors under this key, and has none in a CPU build.
        if torch.version.cuda or torch.version.hip:
            switch.module = importlib.import_module(OPERATORS[name])
            _register_missing(switch, switch.module.OVERRIDES, force)
            if first:
                switch.hook("prepare")
        return switch


def _register_missing(switch: _Switch, overrides: tuple[Override, ...], force: bool) -> None:
    there = {route.override.overload for route in switch.routes}
    for override in overrides:
        needed = override.only_with_wins is None or force or wins.is_won_anywhere(override.only_with_wins)
        if needed and override.overload not in there:
            switch.routes.append(_Route(override, "CUDA", switch))


def register_for_test(name: str, overrides: tuple[Override, ...], key: str) -> None:
    """Route ``overrides`` at another dispatch key, for tests in a process of their own: it cannot be undone.

    PyTorch has no CPU kernel of ``aten::_fused_rms_norm_backward``: a refused call of it then has nowhere to go.
    """
    switch = _switch(name)
    with _lock:
        switch.routes.extend(_Route(override, key, switch) for override in overrides)


def enable(*operators: str, force: bool = False) -> None:
    """Let Octavo's kernels serve these operators (all of them by default) where they were measured faster.

    Args:
        operators: names from ``OPERATORS``.
        force: take every call that the kernels are right for, measured or not (for tests and benchmarks).

    Raises:
        ValueError: for an unknown name.
    """
    for name in _names(operators):
        _switch(name, force).turn(True, force)


def disable(*operators: str) -> None:
    """Give these operators (all by default) back to PyTorch's kernels."""
    for name in _names(operators):
        switch = _switches.get(name)
        if switch is not None:
            switch.turn(False, False)


@contextlib.contextmanager
def enabled(*operators: str, force: bool = False) -> Iterator[None]:
    """``enable`` inside the block, then what was before. Holds for all threads, as a dispatcher does."""
    names = _names(operators)
    before = {name: (switch.enabled, switch.forced) for name in names for switch in [_switch(name)]}
    enable(*names, force=force)
    try:
        yield
    finally:
        for name, state in before.items():
            _switches[name].turn(*state)


def enable_from_environment(force: bool = False) -> tuple[str, ...]:
    """Enable what ``$OCTAVO_OPERATORS`` names; returns the names.

    Raises:
        ValueError: for an unknown name in it.
    """
    text = os.environ.get(ENVIRONMENT, "").strip()
    if not text or text == "0":
        return ()
    names = () if text in ("all", "1") else tuple(part.strip() for part in text.split(",") if part.strip())
    names = _names(names)
    enable(*names, force=force)
    return names


def _tables(name: str) -> dict[str, str]:
    if not torch.cuda.is_initialized():
        return {}
    from octavo import hardware

    found = {}
    for index in range(torch.cuda.device_count()):
        architecture = hardware.architecture(torch.device("cuda", index))
        table = wins.tables(architecture).get(name)
        if table is not None:
            found[architecture] = table.run
    return found


def status() -> list[OperatorStatus]:
    """One entry for every overload that was ever enabled in this process."""
    out = []
    for name, switch in _switches.items():
        for route in switch.routes:
            out.append(
                OperatorStatus(
                    route.override.overload,
                    switch.enabled,
                    switch.forced,
                    *route.counts(),
                    _tables(name),
                    "python" if route.native is None else "c++",
                )
            )
        for overload, (taken, refused) in (switch.hook("counted") or {}).items():
            state = switch.enabled, switch.forced
            out.append(OperatorStatus(overload, *state, taken, refused, _tables(name), "inductor"))
    return out


def reset_counts() -> None:
    """Start the counts of ``status`` again."""
    for switch in _switches.values():
        for route in switch.routes:
            route.reset()
        switch.hook("reset")


def why_not(name: str, overload: str, *args: Any, **kwargs: Any) -> str | None:
    """Why an enabled operator would refuse a call of ``overload`` with these arguments, or None if it would not.

    Raises:
        ValueError: for an unknown operator or overload.
    """
    _names((name,))
    for override in importlib.import_module(OPERATORS[name]).OVERRIDES:
        if override.overload == overload:
            return override.why_not(*args, **kwargs) or override.measured(*args, **kwargs)
    raise ValueError(f"operator {name!r} does not serve {overload!r}")
