"""Compiled text on disk, so that a second `octavo check` compiles only what changed.

An entry is keyed by everything that can change the text: Triton's version, the kernel's source with all the
functions it calls (Triton's own source key), the files of every module its module takes names from (Triton's key
leaves out what compile-time functions call), the target, the signature, the constants and the options. Binaries
are not kept: they follow from the text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from octavo.check import compile as compiling
from octavo.check.compile import Argument, CompiledKernel, compile_kernel
from octavo.check.flydsl_compile import compile_flydsl
from octavo.compile_cases import CompileCase

FOLDER_VARIABLE = "OCTAVO_CHECK_CACHE"
_LAYOUT = "2"


def folder() -> Path:
    """`$OCTAVO_CHECK_CACHE`, or `octavo/check` in the user's cache folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo" / "check"


def key(case: CompileCase, target: str) -> str:
    """Name of the entry of `case` for `target`, from its sources and settings.

    Raises:
        ValueError: if the function is no Triton function, or `TRITON_INTERPRET=1` made it one that runs in Python.
    """
    import triton

    source = getattr(case.function, "cache_key", None)
    if source is None:
        raise ValueError(
            f"{case.name}: {case.function!r} cannot be compiled: need a @triton.jit function and no "
            "TRITON_INTERPRET=1, which turns kernels into Python"
        )
    parts = [
        _LAYOUT, triton.__version__, source, target, repr(sorted(case.signature.items())),
        repr(sorted(case.constexprs.items(), key=str)), repr(sorted(case.divisible)), str(case.num_warps),
        str(case.num_stages), str(case.fp_fusion), repr(sorted(case.options.items(), key=str)),
        _digest(compiling.__name__), *([_digest(compile_flydsl.__module__)] if case.language == "flydsl" else []),
        *(_digest(name) for name in _modules(case.function.fn.__module__)),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _modules(start: str) -> list[str]:
    """`start` and every module it takes names from, directly or not, that lies in the same package."""
    found, waiting = {start}, [start]
    while waiting:
        module = sys.modules[waiting.pop()]
        for value in list(vars(module).values()):
            name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            inside = isinstance(name, str) and name.split(".")[0] in (start.split(".")[0], "octavo")
            if inside and name in sys.modules and name not in found:
                found.add(name)
                waiting.append(name)
    return sorted(found)


@functools.cache
def _digest(module: str) -> str:
    file = getattr(sys.modules[module], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def read(name: str) -> CompiledKernel | None:
    """The kernel stored as `name`, without its binary and earlier stages, or None; a damaged entry counts as none."""
    path = folder() / f"{name}.json.gz"
    try:
        fields = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError):
        return None
    fields["arguments"] = tuple(Argument(**a) for a in fields["arguments"])
    return CompiledKernel(binary=b"", **fields)


def compile_case(case: CompileCase, target: str) -> CompiledKernel:
    """Compile `case` for `target` and store the text; from the store if it is there."""
    name = key(case, target)
    stored = read(name)
    if stored is not None:
        return stored
    if case.language == "flydsl":
        kernel = compile_flydsl(
            case.function, target, case.signature, case.constexprs, divisible=case.divisible, num_warps=case.num_warps
        )  # fmt: skip
    else:
        kernel = compile_kernel(
            case.function, target, case.signature, case.constexprs, divisible=case.divisible, num_warps=case.num_warps,
            num_stages=case.num_stages, fp_fusion=case.fp_fusion, options=case.options,
        )  # fmt: skip
    if target == "sm_90":
        kernel = dataclasses.replace(kernel, **cubin_resources(kernel.binary))
    _write(name, kernel)
    return kernel


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """Registers and local memory (bytes a thread: stack and spills) of a cubin, by Triton's packaged cuobjdump."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], capture_output=True, text=True
        )
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", run.stdout)
    if usage is None:
        raise ValueError(f"cuobjdump gave no resource usage: {run.stderr or run.stdout!r}")
    return {"vgprs": int(usage[1]), "scratch_bytes": int(usage[2]) + int(usage[3])}


def _write(name: str, kernel: CompiledKernel) -> None:
    fields = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel)}
    del fields["binary"], fields["stages"]
    fields["arguments"] = [dataclasses.asdict(a) for a in kernel.arguments]
    path = folder() / f"{name}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a reader in another process never sees half an entry.
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(json.dumps(fields).encode(), 6))
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
