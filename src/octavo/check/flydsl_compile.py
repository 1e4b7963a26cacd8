"""Compile a FlyDSL kernel for gfx950 on a machine that has none, to the text that Triton's kernels give.

FlyDSL compiles without a GPU when `COMPILE_ONLY`, `ARCH` and `FLYDSL_GPU_ARCH` are set, and writes the compiled text
under `FLYDSL_DUMP_DIR`. It links a code object with `$ROCM_PATH/llvm/bin/ld.lld`: without ROCm an `ld.lld` of LLVM 19
or newer on the path is put there. An instruction that the target lacks ends the process, so `octavo check` compiles
in workers (`octavo.check.worker`).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo import hardware
from octavo.check.compile import CompiledKernel, read_arguments
from octavo.errors import UserError
from octavo.flydsl.kernel import FlyKernel, placeholders

OLDEST_LLD = 19
LINKERS = ("ld.lld", *(f"ld.lld-{release}" for release in range(30, OLDEST_LLD - 1, -1)))
_LINKER_IN_ROCM = Path("llvm", "bin", "ld.lld")


def why_no_compiler() -> str | None:
    """Why FlyDSL kernels cannot be compiled here, in one line, or None."""
    reason = hardware.why_no_flydsl()
    if reason is None and find_linker() is None:
        reason = (
            f"FlyDSL needs an ld.lld of LLVM {OLDEST_LLD} or newer, and neither $ROCM_PATH/llvm/bin nor the path has "
            "one (ROCm brings it; on Debian: apt-get install lld-22)"
        )
    return reason


def find_linker() -> Path | None:
    """`$ROCM_PATH/llvm/bin/ld.lld` (`/opt/rocm` without the variable), or an `ld.lld` on the path."""
    own = Path(os.environ.get("ROCM_PATH") or "/opt/rocm") / _LINKER_IN_ROCM
    if own.exists():
        return own
    return next((Path(found) for name in LINKERS if (found := shutil.which(name))), None)


def compile_flydsl(
    kernel: FlyKernel,
    target: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    divisible: tuple[str, ...] = (),
    num_warps: int,
) -> CompiledKernel:
    """Compile `kernel` for `target` without a GPU; `binary` stays empty.

    Args:
        kernel: the builder.
        target: an architecture of `hardware.FLYDSL_ARCHITECTURES`.
        signature, divisible: of the run-time arguments, as `octavo.flydsl.kernel.placeholders` takes them.
        constants: what the builder takes.
        num_warps: waves in a workgroup.

    Raises:
        UserError: for another target, or without FlyDSL or a linker.
        RuntimeError: if FlyDSL wrote no text.
    """
    if target not in hardware.FLYDSL_ARCHITECTURES:
        raise UserError(
            f"FlyDSL kernels compile for {', '.join(hardware.FLYDSL_ARCHITECTURES)}, not for {target!r}"
        )
    reason = why_no_compiler()
    if reason is not None:
        raise UserError(reason)
    with tempfile.TemporaryDirectory(prefix="octavo-flydsl-") as folder, _compiling_for(target, Path(folder)):
        import flydsl.compiler as flyc

        launch = kernel.build(**constants)
        # It tells where it wrote the text.
        with contextlib.redirect_stdout(io.StringIO()):
            flyc.compile(launch, *placeholders(signature, divisible), 1, 1, 1, _no_stream())
        texts = sorted(Path(folder, "dump").rglob("*_final_isa.s"))
        if len(texts) != 1:
            raise RuntimeError(f"FlyDSL wrote {len(texts)} compiled texts for {kernel.__name__}; needed one")
        return describe(texts[0].read_text(), target, num_warps)


def _no_stream() -> Any:
    import flydsl.expr as fx

    return fx.Stream(None)


@contextlib.contextmanager
def _compiling_for(target: str, folder: Path) -> Iterator[None]:
    """FlyDSL's settings for the block: compile alone, keep nothing but the text, link with what is here."""
    linker = find_linker()
    assert linker is not None
    placed = folder / "rocm" / _LINKER_IN_ROCM
    placed.parent.mkdir(parents=True)
    placed.symlink_to(linker)
    settings = {
        "COMPILE_ONLY": "1", "ARCH": target, "FLYDSL_GPU_ARCH": target, "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
        "FLYDSL_DEBUG_DUMP_ASM": "1", "FLYDSL_DUMP_DIR": str(folder / "dump"), "ROCM_PATH": str(folder / "rocm"),
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_METADATA = {
    "vgprs": "vgpr_count",
    "agprs": "agpr_count",
    "sgprs": "sgpr_count",
    "vgpr_spills": "vgpr_spill_count",
    "sgpr_spills": "sgpr_spill_count",
    "scratch_bytes": "private_segment_fixed_size",
    "lds_bytes": "group_segment_fixed_size",
    "kernarg_bytes": "kernarg_segment_size",
}
"""Field of `CompiledKernel` to its name in the code object's notes (LLVM AMDGPU usage, code object V5)."""


def describe(asm: str, target: str, num_warps: int) -> CompiledKernel:
    """A `CompiledKernel` of amdgcn text without LLVM's comments: all is read from the notes, `code_bytes` stays 0.

    Raises:
        ValueError: if the notes lack a number, so that a change of format cannot pass as "no spills".
    """
    found: dict[str, Any] = {}
    for field, name in _METADATA.items():
        match = re.search(rf"^[\s-]+\.{name}:\s+(\d+)", asm, re.MULTILINE)
        if match is None:
            raise ValueError(f"the notes of the amdgcn text do not state {name}: unknown LLVM format")
        found[field] = int(match[1])
    name = re.search(r"^\s+\.amdhsa_kernel (\S+)", asm, re.MULTILINE)
    if name is None:
        raise ValueError("the amdgcn text describes no kernel (no .amdhsa_kernel)")
    # The notes count accumulation registers in both; the text's other readers keep the two apart.
    found["vgprs"] -= found["agprs"]
    whole = max(8, -(-(found["vgprs"] + found["agprs"]) // 8) * 8)
    return CompiledKernel(
        name=name[1], target=target, asm=asm, binary=b"", num_warps=num_warps, occupancy=min(8, 512 // whole),
        arguments=read_arguments(asm), **found,
    )  # fmt: skip
