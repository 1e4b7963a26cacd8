"""16-bit rows by a weight in 8 or 4 bits, for inference: ``octavo::mixed_mm``, its kernels and its shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from octavo import dispatch, hardware, library
from octavo.formats import Format, ScaledTensor
from octavo.operators import wins
from octavo.operators.gemm import plan as plans
from octavo.operators.gemm import reference

ROW_DTYPES = (torch.bfloat16, torch.float16)


def mixed_mm(x: torch.Tensor, weight: ScaledTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x[M, K] @ weight[N, K].T + bias[N]`` in x's dtype, the weight decoded inside the kernel.

    Args:
        x: bfloat16 or float16 (any floating dtype for the reference).
        weight: MXFP8, MXFP4, or e4m3 with a float32 scale for each 128 x 128 block.
        bias: in x's dtype.

    Returns:
        [M, N], summed in float32 and rounded once; see :func:`octavo.operators.gemm.reference.mixed_mm`.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit.
    """
    n, k = weight.shape[0], weight.shape[-1]
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != k or not x.is_floating_point():
        raise ValueError(
            f"mixed_mm multiplies rows [M, K] by a weight [N, K] transposed; got {tuple(x.shape)} in {x.dtype} and "
            f"{tuple(weight.shape)}: flatten the rows, and give them the weight's K"
        )
    if x.device != weight.device:
        raise ValueError(f"the rows lie on {x.device} and the weight on {weight.device}: move one of them")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.dtype != x.dtype or bias.device != x.device):
        raise ValueError(
            f"bias must be ({n},) in {x.dtype} on {x.device}; got {tuple(bias.shape)} in {bias.dtype} on {bias.device}"
        )
    return torch.ops.octavo.mixed_mm(x, weight.data, weight.scale, weight.format.key, bias)


def why_not_kernel(x: torch.Tensor, weight: ScaledTensor, bias: torch.Tensor | None) -> str | None:
    """Why the Triton kernel cannot serve this product, or None."""
    if x.dtype not in ROW_DTYPES:
        return f"rows of bfloat16 and float16 alone, not {x.dtype}"
    fmt = weight.format
    if not fmt.is_mx and (fmt.granularity != "128x128" or not fmt.element.name.startswith("e4m3")):
        return f"weights in MX or e4m3 in 128 x 128 blocks alone, not {fmt.key}"
    if 0 in (*x.shape, weight.shape[0]):
        return "an extent is zero"
    return hardware.why_no_triton(x.device)


_ignore_table = False


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Inside the block no measurement is asked for: how kernels are timed. Holds for all threads."""
    global _ignore_table
    before, _ignore_table = _ignore_table, True
    try:
        yield
    finally:
        _ignore_table = before


def measured(x: torch.Tensor, weight: ScaledTensor) -> str | None:
    """Why the weight is better decoded first, by a table of wins; None where one says so or none names mixed_mm."""
    architecture = hardware.architecture(x.device)
    if "mixed_mm" not in wins.tables(architecture):
        return None
    sizes = {"m": x.shape[0], "n": weight.shape[0], "k": x.shape[1]}
    name = plans.work_of(None, weight.format).rpartition(" ")[2]
    return wins.why_not("mixed_mm", x.device, format=name, **sizes)


def run_kernel(
    x: torch.Tensor, weight: ScaledTensor, bias: torch.Tensor | None, plan: plans.Plan | None = None
) -> torch.Tensor:
    """The product by the plan of the table, or by decoding first where that was measured to be no slower."""
    from octavo.operators.gemm import launch

    if plan is None:
        plan = plans.choose(hardware.architecture(x.device), plans.work_of(None, weight.format), x.shape[0])
        if plan.kind != "decode_first" and not _ignore_table and measured(x, weight) is not None:
            plan = plans.Plan("decode_first")
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return launch.product(x, weight, bias, out, plan)


def _run(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, key: str, bias: torch.Tensor | None
) -> torch.Tensor:
    return dispatch.run("mixed_mm", x, ScaledTensor(data, scale, Format.from_key(key)), bias)


library.define(
    "mixed_mm(Tensor x, Tensor weight, Tensor weight_scale, str weight_format, Tensor? bias) -> Tensor",
    _run,
    lambda x, data, scale, key, bias: x.new_empty((x.shape[0], data.shape[0])),
)
dispatch.register(
    dispatch.Kernel("mixed_mm", "triton", "octavo.operators.gemm.mixed:run_kernel", why_not_kernel),
    dispatch.Kernel("mixed_mm", "reference", f"{reference.__name__}:mixed_mm", lambda *_: None),
)
