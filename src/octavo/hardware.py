"""The one description of the machine: architecture, FP8 family, installed kernel languages.

No other file asks the device or looks for optional packages.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Iterator

import torch

from octavo._version import __version__
from octavo.formats import Format

FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")
FP8_MATMUL_ARCHITECTURES = (
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_103",
    "sm_120",
    "gfx940",
    "gfx941",
    "gfx942",
    "gfx950",
)
KERNEL_ARCHITECTURES = ("sm_90", "gfx942", "gfx950")
"""What the Triton kernels are written for, compiled for and tested on or for."""

FLYDSL_ARCHITECTURES = ("gfx950",)
"""What the FlyDSL kernels are written for."""
OLDEST_FLYDSL, NEWEST_FLYDSL = (0, 4), (0, 5)
"""Releases (major, minor) that the FlyDSL kernels were compiled with; the extra `flydsl` asks for the same."""

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 14)

_assumed: list[str] = []


@contextlib.contextmanager
def assume_architecture(name: str) -> Iterator[None]:
    """Answer ``name`` for every non-CPU device inside the block, to explain or check another card's choices."""
    _assumed.append(name)
    try:
        yield
    finally:
        _assumed.pop()


_architectures: dict[int, str] = {}


def _gpu_architecture(index: int) -> str:
    # A dictionary and not functools.cache, which torch.compile warns of where it traces through here.
    found = _architectures.get(index)
    if found is None:
        properties = torch.cuda.get_device_properties(index)
        hip = torch.version.hip
        found = properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
        _architectures[index] = found
    return found


def architecture(device: torch.device | str) -> str:
    """Architecture of ``device``: ``"cpu"``, ``"sm_90"``, ``"gfx942"``, ``"gfx950"``, or the device type."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return device.type
    if _assumed:
        return _assumed[-1]
    if device.type == "cuda":
        return _gpu_architecture(torch.cuda.current_device() if device.index is None else device.index)
    return device.type


def fp8_family(device: torch.device | str) -> str:
    """``"fnuz"`` on gfx940, gfx941 and gfx942, ``"ocp"`` elsewhere; never a process-wide choice."""
    return "fnuz" if architecture(device) in FNUZ_ARCHITECTURES else "ocp"


def native_format(fmt: Format, device: torch.device | str) -> Format:
    """``fmt`` in the FP8 family of ``device``: e4m3fn becomes e4m3fnuz on MI300."""
    return fmt.with_family(fp8_family(device))


def has_triton() -> bool:
    """Whether Triton is installed (found, not imported)."""
    return _version("triton") is not None


def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton; (0, 0) without one."""
    found = _version("triton")
    if found is None or not found[0].isdigit():
        return (0, 0)
    major, minor = found.split(".")[:2]
    return int(major), int(minor)


def has_flydsl() -> bool:
    """Whether FlyDSL is installed (found, not imported)."""
    return _version("flydsl") is not None


def flydsl_version() -> tuple[int, int]:
    """(major, minor) of the installed FlyDSL; (0, 0) without one."""
    return _release(_version("flydsl"))


@functools.cache
def why_no_flydsl() -> str | None:
    """Why FlyDSL kernels cannot be built at all, in one line, or None; the import is tried once, and only here.

    Reads the installed version first, so that a release outside the tested range is never imported.
    """
    if not has_flydsl():
        return "flydsl is not installed (pip install 'octavo[flydsl]')"
    found, wanted = _version("flydsl"), ".".join(map(str, OLDEST_FLYDSL))
    if flydsl_version() < OLDEST_FLYDSL:
        return f"flydsl {found} is older than {wanted}, the oldest tested (pip install -U 'octavo[flydsl]')"
    if flydsl_version() > NEWEST_FLYDSL:
        newest = ".".join(map(str, NEWEST_FLYDSL))
        return f"flydsl {found} is newer than {newest}, the newest tested (pip install 'octavo[flydsl]')"
    try:
        importlib.import_module("flydsl.compiler")
        importlib.import_module("flydsl.expr")
    # A compiler with native parts fails in many ways (a missing library, another ABI): each is a reason, no crash.
    except Exception as error:
        told = " ".join(str(error).split())[:160]
        return f"flydsl {found} does not import ({type(error).__name__}: {told}): reinstall 'octavo[flydsl]'"
    return None


def why_no_flydsl_on(device: torch.device) -> str | None:
    """Why Octavo's FlyDSL kernels cannot serve tensors on ``device``, or None if they can."""
    arch = architecture(device)
    if arch not in FLYDSL_ARCHITECTURES:
        return f"FlyDSL kernels are written for {', '.join(FLYDSL_ARCHITECTURES)}, not for {arch}"
    return why_no_flydsl()


def _release(version: str | None) -> tuple[int, int]:
    parts = (version or "").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and "".join(parts[:2]).isdigit() else (0, 0)


@functools.cache
def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, which serves CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def why_no_triton(device: torch.device) -> str | None:
    """Why Octavo's Triton kernels cannot serve tensors on ``device``, or None if they can."""
    if not has_triton():
        return "triton is not installed (pip install 'octavo[triton]')"
    if device.type == "cpu":
        return None if interpreted() else "Triton kernels need a GPU and the tensor is on the CPU"
    arch = architecture(device)
    if arch not in KERNEL_ARCHITECTURES:
        return f"written for {', '.join(KERNEL_ARCHITECTURES)}, not for {arch}"
    return None


def check_torch_version() -> None:
    """Warn, once, on a PyTorch outside the tested range.

    Raises:
        ImportError: on a PyTorch too old to have the operators that Octavo calls.
    """
    parts = torch.__version__.split("+")[0].split(".")
    found = (int(parts[0]), int(parts[1]))
    if found < OLDEST_TORCH:
        raise ImportError(f"octavo needs PyTorch 2.11 or newer and found {torch.__version__}: upgrade torch")
    if found > NEWEST_TORCH:
        warnings.warn(
            f"PyTorch {torch.__version__} is newer than the newest one Octavo was tested with "
            f"({NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}); results are checked by `make test`",
            stacklevel=3,
        )


def devices() -> list[dict[str, object]]:
    """Every usable device: name, architecture, FP8 family, whether FP8 products are native, memory in GB."""
    found: list[dict[str, object]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "architecture": "cpu",
         "fp8": "ocp", "native_fp8_matmul": False}
    ]  # fmt: skip
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        arch = _gpu_architecture(index)
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {"device": f"cuda:{index}", "name": properties.name, "architecture": arch,
             "fp8": fp8_family(f"cuda:{index}"), "native_fp8_matmul": arch in FP8_MATMUL_ARCHITECTURES,
             "memory_gb": round(properties.total_memory / 1e9, 1)}
        )  # fmt: skip
    return found


def versions() -> dict[str, str | None]:
    """Versions of octavo, Python and the packages that matter to it; None where not installed."""
    packages = ("torch", "triton", "flydsl", "torchao", "torchtitan", "transformers", "vllm")
    return {"octavo": __version__, "python": sys.version.split()[0], **{p: _version(p) for p in packages}}
