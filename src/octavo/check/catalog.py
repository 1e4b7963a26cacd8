"""Find what to compile: the cases that kernel modules yield by the protocol of `octavo.compile_cases`.

Rooms without cases of their own are covered by `octavo.check.rooms`, which records their launches.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.check.compile import TARGETS
from octavo.check.flydsl_compile import why_no_compiler
from octavo.compile_cases import CompileCase

PATTERNS = ("*_kernels.py", "kernels.py")
RECORDED = "octavo.check.rooms"
FLYDSL = "octavo.flydsl."


@dataclass(frozen=True)
class Entry:
    """A case and where a fresh process finds it again: item `index` of `module.compile_cases(target)`."""

    case: CompileCase
    target: str
    module: str
    index: int

    @property
    def name(self) -> str:
        return self.case.name


def kernel_modules() -> list[str]:
    """Names of the package's modules that hold kernels, found by file name and not imported."""
    spec = importlib.util.find_spec("octavo")
    names = set()
    for root in spec.submodule_search_locations or () if spec else ():
        for path in (p for pattern in PATTERNS for p in Path(root).rglob(pattern)):
            names.add(".".join(("octavo", *path.relative_to(root).with_suffix("").parts)))
    return sorted(names)


def entries(target: str, modules: Sequence[str] | None = None) -> list[Entry]:
    """Every case of `target`; a module without `compile_cases` (helpers of other kernels) has none.

    A FlyDSL module counts only where FlyDSL compiles (`left_out` says why not). Other import errors pass through: a
    broken module must not look like one without kernels.

    Raises:
        ValueError: for an unknown target, or two cases of one name.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is not one of {', '.join(TARGETS)}")
    found: list[Entry] = []
    for name in kernel_modules() if modules is None else modules:
        cases = _provider(name)
        if cases is not None:
            found += [Entry(case, target, name, i) for i, case in enumerate(cases(target))]
    if modules is None:
        # A room's own cases stand for its launches; another room may launch its kernels in other configurations.
        own = {(entry.case.kernel, entry.case.room) for entry in found}
        recorded = enumerate(_cases(RECORDED, target))
        found += [
            Entry(case, target, RECORDED, i) for i, case in recorded if (case.kernel, case.room) not in own
        ]
    seen: dict[str, str] = {}
    for entry in found:
        if entry.name in seen:
            raise ValueError(
                f"{entry.name!r} is yielded twice for {target}, by {seen[entry.name]} and {entry.module}: "
                "give each case its own configuration text"
            )
        seen[entry.name] = entry.module
    return found


def find(module: str, target: str, index: int) -> CompileCase:
    """The case of an `Entry`, in another process."""
    return _cases(module, target)[index]


@functools.cache
def _cases(module: str, target: str) -> list[CompileCase]:
    provider = _provider(module)
    if provider is None:
        raise ValueError(f"{module} has no compile_cases")
    return provider(target)


def left_out() -> str | None:
    """Why FlyDSL's kernels are not among the entries, in one line, or None if they are."""
    reason = why_no_compiler()
    return None if reason is None else f"FlyDSL kernels are left out: {reason}"


def _provider(name: str) -> Callable[[str], list[CompileCase]] | None:
    if name.startswith(FLYDSL) and left_out() is not None:
        return None
    return getattr(importlib.import_module(name), "compile_cases", None)


def choose(found: Iterable[Entry], kernel: str | None, every: bool) -> list[Entry]:
    """The entries of `kernel` (all of its configurations), or of all kernels: the first of each kind, or `every`.

    Raises:
        ValueError: if no kernel has that name.
    """
    found = list(found)
    if kernel is not None:
        chosen = [e for e in found if e.case.kernel == kernel]
        if not chosen:
            names = ", ".join(sorted({e.case.kernel for e in found})) or "none"
            told = f" ({left_out()})" if left_out() else ""
            raise ValueError(f"no kernel is called {kernel!r}; kernels with compile cases: {names}{told}")
        return chosen
    if every:
        return found
    first: dict[tuple[str, str, str], Entry] = {}
    for entry in found:
        first.setdefault((entry.target, entry.case.kernel, entry.case.kind), entry)
    return list(first.values())
