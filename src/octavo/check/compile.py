"""Compile a Triton kernel for gfx942, gfx950 or sm_90 on a machine that has none of them.

Triton's compiler needs no GPU when the target is named, but two things do ask for a driver: `tl.target_info`
(which answers "neither HIP nor CUDA", silently, when no driver is active, and whose answer ends in the cache) and
the default target. So a compilation here runs with a stand-in driver that only names the target, and in a cache
folder of its own for each target. Floating-point fusion is always passed explicitly, since Triton's default
changes between releases.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TARGETS = ("gfx942", "gfx950", "sm_90")

# Local data share of a compute unit, in bytes (AMD's CDNA3 and CDNA4 ISA documents).
LDS_LIMIT = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}


@dataclass(frozen=True)
class Argument:
    """One slot of the kernel argument segment: `kind` is AMD's value_kind (`global_buffer`, `by_value`, ...)."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler made of a kernel for one target.

    `asm` is LLVM's amdgcn text (PTX for sm_90), `binary` the code object (hsaco, cubin), `lds_bytes` the dynamic
    LDS that the launch asks for (the text says 0). Register counts, spills (in registers), scratch (bytes a lane)
    and occupancy (waves a SIMD by registers alone: LLVM ignores LDS) come from the text and are 0 for sm_90.
    `arguments` lists every slot of the argument segment, hidden ones included, in order.
    """

    name: str
    target: str
    asm: str = field(repr=False)
    binary: bytes = field(repr=False)
    lds_bytes: int
    num_warps: int
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0
    scratch_bytes: int = 0
    occupancy: int = 0
    code_bytes: int = 0
    kernarg_bytes: int = 0
    arguments: tuple[Argument, ...] = ()
    stages: Mapping[str, str] = field(default_factory=dict, repr=False)


def compile_kernel(
    fn: Any,
    target: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    *,
    divisible: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int | None = None,
    fp_fusion: bool = True,
    options: Mapping[str, Any] | None = None,
) -> CompiledKernel:
    """Compile the `@triton.jit` function `fn` for `target` without a GPU.

    `signature` gives the Triton type of each run-time parameter (`"*fp32"`, `"*fp8e4b8"`, `"i32"`, ...),
    `constexprs` the value of each compile-time one, `divisible` the parameters (pointers or sizes) that callers
    promise to be multiples of 16. `options` are passed to the backend (`waves_per_eu`, `matrix_instr_nonkdim`, ...).
    Raises ValueError for an unknown target or a parameter that is not accounted for; compiler errors pass through.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is not one of {', '.join(TARGETS)}")
    import triton
    from triton.compiler import ASTSource

    constexprs = dict(constexprs or {})
    names = list(fn.arg_names)
    missing = [n for n in names if n not in signature and n not in constexprs]
    extra = [n for n in (*signature, *constexprs, *divisible) if n not in names]
    if missing or extra:
        raise ValueError(
            f"{fn.__name__}: parameters without a type or value {missing}, names it does not have {extra}; "
            "give each parameter exactly once, in signature or in constexprs"
        )
    types = {n: "constexpr" if n in constexprs else signature[n] for n in names}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    backend_options = {"num_warps": num_warps, "enable_fp_fusion": fp_fusion, **dict(options or {})}
    if num_stages is not None:
        backend_options["num_stages"] = num_stages
    gpu = _gpu_target(target)
    with _target_active(target, gpu):
        kernel = triton.compile(ASTSource(fn, types, constexprs, attrs), target=gpu, options=backend_options)
    return _describe(kernel, target)


@functools.cache
def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", target, 64)


@functools.cache
def _cache_folder(target: str) -> str:
    folder = tempfile.mkdtemp(prefix=f"octavo-check-{target}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _named_driver(target: str) -> Any:
    from triton.backends.driver import DriverBase

    def answer(result: Any) -> Any:
        return lambda *_args, **_kwargs: result

    # DriverBase is abstract and its abstract methods differ between Triton releases: answer None to all but these.
    members = dict.fromkeys(DriverBase.__abstractmethods__, answer(None))
    members |= {
        "__init__": lambda self: None,
        "get_current_target": answer(_gpu_target(target)),
        "get_current_device": answer(0),
        "is_active": staticmethod(answer(True)),
    }
    return type("NamedTarget", (DriverBase,), members)()


@contextlib.contextmanager
def _target_active(target: str, gpu: Any) -> Iterator[None]:
    """Make `target` Triton's active driver, with its own cache folder; restore both afterwards."""
    from triton import knobs
    from triton.runtime import driver

    previous = driver._active
    with knobs.cache.scope():
        knobs.cache.dir = _cache_folder(target)
        driver.set_active(_named_driver(target))
        try:
            yield
        finally:
            driver._active = previous


def _describe(kernel: Any, target: str) -> CompiledKernel:
    metadata = kernel.metadata
    text = {k: v for k, v in kernel.asm.items() if isinstance(v, str)}
    if target == "sm_90":
        return CompiledKernel(
            metadata.name,
            target,
            text["ptx"],
            kernel.asm["cubin"],
            metadata.shared,
            metadata.num_warps,
            stages=text,
        )
    asm = text["amdgcn"]
    return CompiledKernel(
        name=metadata.name,
        target=target,
        asm=asm,
        binary=kernel.asm["hsaco"],
        lds_bytes=metadata.shared,
        num_warps=metadata.num_warps,
        stages=text,
        **read_resources(asm),
    )


_RESOURCES = {
    "vgprs": r"^; NumVgprs: (\d+)",
    "agprs": r"^; NumAgprs: (\d+)",
    "sgprs": r"^\s+\.sgpr_count:\s+(\d+)",
    "vgpr_spills": r"^\s+\.vgpr_spill_count:\s+(\d+)",
    "sgpr_spills": r"^\s+\.sgpr_spill_count:\s+(\d+)",
    "scratch_bytes": r"^; ScratchSize: (\d+)",
    "occupancy": r"^; Occupancy: (\d+)",
    "code_bytes": r"^; codeLenInByte = (\d+)",
    "kernarg_bytes": r"^\s+\.kernarg_segment_size:\s+(\d+)",
}


def read_resources(asm: str) -> dict[str, Any]:
    """Read register counts, spills, scratch, occupancy and the argument layout from amdgcn text.

    Raises ValueError when the text lacks one of them, so that a change of LLVM's format cannot pass as "no spills".
    """
    found: dict[str, Any] = {}
    for name, pattern in _RESOURCES.items():
        match = re.search(pattern, asm, re.MULTILINE)
        if match is None:
            raise ValueError(
                f"the amdgcn text does not state {name} (looked for {pattern!r}): unknown LLVM format"
            )
        found[name] = int(match[1])
    found["arguments"] = read_arguments(asm)
    return found


def read_arguments(asm: str) -> tuple[Argument, ...]:
    """Every slot of the argument segment, in order, from the notes of amdgcn text."""
    notes = asm[asm.index(".amdgpu_metadata") :]
    section = re.search(r"^    \.args:(.*?)^    \.[a-z]", notes, re.MULTILINE | re.DOTALL)
    if section is None:
        return ()
    arguments = []
    for entry in re.split(r"^      - ", section[1], flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"\.(\w+):\s+(\S+)", entry))
        arguments.append(Argument(int(fields["offset"]), int(fields["size"]), fields["value_kind"]))
    return tuple(arguments)
