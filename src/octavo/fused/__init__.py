"""Producers that emit quantized outputs, so that what they produce is not written in 16 bits and read again.

Every function here is one op with a reference; none has gradients of its own: the spanning Functions of
:mod:`octavo.training.spanning` call them on both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo import dispatch, hardware, library
from octavo.formats import Format, ScaledTensor

__all__ = ["quantize_concat", "swiglu_backward_quantize", "swiglu_quantize"]

Optional2 = tuple[ScaledTensor | None, ScaledTensor | None]


def quantize_concat(
    xs: Sequence[torch.Tensor],
    dim: int,
    fmt: Format | None,
    transposed_fmt: Format | None = None,
    *,
    after: torch.Tensor | None = None,
) -> Optional2:
    """Quantize the concatenation of matrices without making it.

    Args:
        xs: matrices of one dtype, equal in every dimension but ``dim`` (0 or 1).
        fmt: format of the concatenation X [M, K], or None.
        transposed_fmt: format of its transpose [K, M], or None.
        after: as in :func:`octavo.quantize`.

    Returns:
        The operands asked for, as ``quantize(torch.cat(xs, dim), ...)`` gives them.

    Raises:
        ValueError: if ``xs`` do not fit together.
    """
    first = xs[0]
    if any(x.ndim != 2 or x.dtype != first.dtype or x.shape[1 - dim] != first.shape[1 - dim] for x in xs):
        raise ValueError(
            f"quantize_concat joins matrices of one dtype along {dim}; got {[(tuple(x.shape), x.dtype) for x in xs]}"
        )
    data, scale, data_t, scale_t = torch.ops.octavo.quantize_concat(
        xs, dim, _key(fmt), _key(transposed_fmt), after
    )
    return _wrap(data, scale, fmt), _wrap(data_t, scale_t, transposed_fmt)


def swiglu_quantize(h: torch.Tensor, fmt: Format) -> ScaledTensor:
    """``silu(gate) * up`` of h = [gate | up] [M, 2 F], quantized: [M, F].

    The activation is computed in float32 and rounded once to the dtype of ``h`` before it is quantized.
    """
    data, scale = torch.ops.octavo.swiglu_quantize(h, fmt.key)
    return ScaledTensor(data, scale, fmt)


def swiglu_backward_quantize(
    h: torch.Tensor,
    grad: torch.Tensor,
    fmt: Format | None,
    transposed_fmt: Format | None,
    activation_fmt: Format | None,
    *,
    keep: bool = False,
) -> tuple[ScaledTensor | None, ScaledTensor | None, ScaledTensor | None, torch.Tensor, torch.Tensor]:
    """Backward of SwiGLU with its outputs quantized, and the activation again, which its weight gradient needs.

    Args:
        h: [M, 2 F] = [gate | up], as given to the forward.
        grad: [M, F] gradient of the activation.
        fmt: format of the gradient of ``h`` [M, 2 F], or None.
        transposed_fmt: format of its transpose [2 F, M], or None.
        activation_fmt: format of the transposed activation [F, M], or None.
        keep: also return the gradient [M, 2 F] and the activation [M, F] in the dtype of ``h``; empty otherwise.
    """
    out = torch.ops.octavo.swiglu_backward_quantize(
        h, grad, _key(fmt), _key(transposed_fmt), _key(activation_fmt), keep
    )
    rows, columns = _wrap(out[0], out[1], fmt), _wrap(out[2], out[3], transposed_fmt)
    return rows, columns, _wrap(out[4], out[5], activation_fmt), out[6], out[7]


def _key(fmt: Format | None) -> str:
    return "" if fmt is None else fmt.key


def _format(key: str) -> Format | None:
    return Format.from_key(key) if key else None


def _wrap(data: torch.Tensor, scale: torch.Tensor, fmt: Format | None) -> ScaledTensor | None:
    return None if fmt is None else ScaledTensor(data, scale, fmt)


# ---- ops ------------------------------------------------------------------------------------------------
# An op's outputs are fixed in number: one that was not asked for is an empty tensor.


def _absent(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0)


def _filled(like: torch.Tensor, outputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(_absent(like) if out is None else out for out in outputs)


def _fake_pair(x: torch.Tensor, shape: tuple[int, ...], key: str) -> tuple[torch.Tensor, torch.Tensor]:
    fmt = _format(key)
    if fmt is None:
        return _absent(x), _absent(x)
    return (
        x.new_empty(fmt.data_shape(shape), dtype=fmt.element.dtype),
        x.new_empty(fmt.scale_shape(shape), dtype=fmt.scale_dtype),
    )


def _fake_concat(
    xs: list[torch.Tensor], dim: int, key: str, key_t: str, after: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    joined = sum(x.shape[dim] for x in xs)
    m, k = (joined, xs[0].shape[1]) if dim == 0 else (xs[0].shape[0], joined)
    return *_fake_pair(xs[0], (m, k), key), *_fake_pair(xs[0], (k, m), key_t)


def _fake_backward(
    h: torch.Tensor, grad: torch.Tensor, key: str, key_t: str, key_a: str, keep: bool
) -> tuple[torch.Tensor, ...]:
    (m, n), f = h.shape, grad.shape[1]
    return (
        *_fake_pair(h, (m, n), key),
        *_fake_pair(h, (n, m), key_t),
        *_fake_pair(h, (f, m), key_a),
        *((h.new_empty((m, n)), h.new_empty((m, f))) if keep else (_absent(h), _absent(h))),
    )


library.define(
    "quantize_concat(Tensor[] xs, int dim, str format, str transposed_format, Tensor? after=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda xs, dim, key, key_t, after=None: _filled(
        xs[0], dispatch.run("quantize_concat", xs, dim, _format(key), _format(key_t))
    ),
    _fake_concat,
)
library.define(
    "swiglu_quantize(Tensor h, str format) -> (Tensor, Tensor)",
    lambda h, key: dispatch.run("swiglu_quantize", h, Format.from_key(key)),
    lambda h, key: _fake_pair(h, (h.shape[0], h.shape[1] // 2), key),
)
library.define(
    "swiglu_backward_quantize(Tensor h, Tensor grad, str format, str transposed_format, str activation_format, "
    "bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda h, grad, key, key_t, key_a, keep: _filled(
        h,
        dispatch.run("swiglu_backward_quantize", h, grad, _format(key), _format(key_t), _format(key_a), keep),
    ),
    _fake_backward,
)

# ---- kernels ----------------------------------------------------------------------------------------------


def _no_triton(x: torch.Tensor | Sequence[torch.Tensor], *_args: object) -> str | None:
    return hardware.why_no_triton(x.device if isinstance(x, torch.Tensor) else x[0].device)


dispatch.register(
    *(
        dispatch.Kernel(op, "triton", f"octavo.fused.triton_launch:{op}", _no_triton)
        for op in ("quantize_concat", "swiglu_quantize", "swiglu_backward_quantize")
    ),
    *(
        dispatch.Kernel(op, "reference", f"octavo.fused.reference:{op}", lambda *_: None)
        for op in ("quantize_concat", "swiglu_quantize", "swiglu_backward_quantize")
    ),
)
