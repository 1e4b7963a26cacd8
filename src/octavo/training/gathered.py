"""A weight that arrived in 8 bits: what FSDP2 gathered stands for the parameter while the layer runs.

:class:`GatheredWeight` has the shape and the dtype of the parameter, so that autograd gives it a gradient in that
dtype, and holds codes and scales instead of values. The layers of this package ask it one question,
``octavo::quantize``, and get what they would have computed; anything else is an error, because the 16-bit
values are not here and answering with decoded ones would change the precision in silence.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.formats import Format

_LIKE = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
)
"""Ops that read shape, dtype and device of a tensor and nothing else."""


class GatheredWeight(torch.Tensor):
    """Codes [..., N, K] and scales of a weight in a format that is the same for its transpose.

    Args:
        codes: in the element dtype of ``key``.
        scale: float32, ``Format.scale_shape(codes.shape)``.
        key: the format, :attr:`octavo.Format.key`; tensorwise or 128x128.
        dtype: what the weight was rounded to before it was quantized.
        group: weights of one group were quantized with a common scale; their concatenation may be asked for.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    key: str
    group: str

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, key: str, dtype: torch.dtype, group: str
    ) -> GatheredWeight:
        self = torch.Tensor._make_wrapper_subclass(
            cls, codes.size(), strides=codes.stride(), dtype=dtype, device=codes.device, requires_grad=False
        )
        self.codes, self.scale, self.key, self.group = codes, scale, key, group
        return self

    def __init__(self, *args: Any) -> None:
        """Everything is done by ``__new__``."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GatheredWeight({tuple(self.shape)}, {self.key}, for {self.dtype}, {self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, str]]:
        return ["codes", "scale"], (self.key, self.dtype, self.group)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: tuple[str, torch.dtype, str], size: Any, stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["codes"], inner["scale"], *meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        answer = _ANSWERS.get(name)
        if answer is not None:
            return answer(func, *args, **(kwargs or {}))
        if name.removeprefix("aten::") in _LIKE:
            return _like(func, *args, **(kwargs or {}))
        raise NotImplementedError(
            f"{name} needs the values of a weight that FSDP gathered in 8 bits ({_first(args)!r}), and they are not "
            "on this device: leave this layer out of octavo.prepare_fsdp(model, skip=...), or read the sharded "
            "parameter outside of forward and backward"
        )


def _first(args: Any) -> GatheredWeight | None:
    for value in args:
        if isinstance(value, GatheredWeight):
            return value
        if isinstance(value, list | tuple) and (found := _first(value)) is not None:
            return found
    return None


def _with(weight: GatheredWeight, codes: torch.Tensor, scale: torch.Tensor) -> GatheredWeight:
    return GatheredWeight(codes, scale, weight.key, weight.dtype, weight.group)


def _quantize(
    func: Any, x: GatheredWeight, key: str, transpose: bool, after: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_key(x, key)
    if transpose:
        return x.codes.mT.contiguous(), x.scale.mT.contiguous()
    return x.codes.contiguous(), x.scale.contiguous()


def _quantize_concat(
    func: Any, xs: list[Any], dim: int, key: str, key_t: str, after: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Of weights joined by rows: their codes joined, where that is what quantizing the whole would give."""
    for x in xs:
        if not isinstance(x, GatheredWeight):
            raise NotImplementedError(
                f"weights in 8 bits and in {xs[0].dtype} are not joined: leave neither or both out of prepare_fsdp"
            )
        for wanted in (key, key_t):
            if wanted:
                _check_key(x, wanted)
    fmt = Format.from_key(xs[0].key)
    if fmt.granularity == "tensorwise":
        fits, scale = len({x.group for x in xs}) == 1, xs[0].scale
    else:
        fits = all(x.shape[0] % fmt.block[0] == 0 for x in xs[:-1])
        scale = torch.cat([x.scale for x in xs], dim)
    if dim != 0 or not fits:
        raise NotImplementedError(
            f"weights that FSDP gathered as {fmt} apart from each other have no common scales along {dim}: "
            "convert with spans=False, or call octavo.prepare_fsdp after octavo.convert"
        )
    codes = torch.cat([x.codes.view(torch.uint8) for x in xs], dim).view(xs[0].codes.dtype)
    empty = codes.new_empty(0)
    direct = (codes, scale) if key else (empty, empty)
    turned = (codes.mT.contiguous(), scale.mT.contiguous()) if key_t else (empty, empty)
    return *direct, *turned


def _check_key(x: GatheredWeight, key: str) -> None:
    if key != x.key:
        raise NotImplementedError(
            f"a weight was gathered as {x.key} and its layer asks for {key}: call octavo.prepare_fsdp after "
            "octavo.convert and before fully_shard, and change no recipe after it"
        )


def _same(func: Any, x: GatheredWeight, *args: Any, **kwargs: Any) -> GatheredWeight:
    return _with(x, x.codes, x.scale)


def _view(func: Any, x: GatheredWeight, size: Any) -> GatheredWeight:
    if tuple(size) != tuple(x.shape):
        raise NotImplementedError(f"view{tuple(size)} of {x!r} other than the whole of it")
    return _same(func, x)


def _as_strided(
    func: Any, x: GatheredWeight, size: Any, stride: Any, storage_offset: int | None = None
) -> GatheredWeight:
    if tuple(size) != tuple(x.shape) or tuple(stride) != x.stride() or storage_offset:
        raise NotImplementedError(f"as_strided of {x!r} other than the whole of it")
    return _same(func, x)


def _transpose(func: Any, x: GatheredWeight, dim0: int = -2, dim1: int = -1) -> GatheredWeight:
    # 128x128 blocks and one scale for all of a matrix are the same for its transpose; experts are not mixed.
    if {dim0 % x.ndim, dim1 % x.ndim} != {x.ndim - 2, x.ndim - 1}:
        raise NotImplementedError(
            f"transpose({dim0}, {dim1}) of {x!r}: only rows and columns can be exchanged"
        )
    return _with(x, x.codes.transpose(dim0, dim1), x.scale.transpose(dim0, dim1))


def _like(func: Any, x: GatheredWeight, *args: Any, **kwargs: Any) -> torch.Tensor:
    blank = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
    if func.name().endswith("_like"):
        kwargs["memory_format"] = torch.contiguous_format
    return func(blank, *args, **kwargs)


def _unseen(func: Any, *args: Any, **kwargs: Any) -> None:
    """A monitor has nothing to compare the codes with."""


_ANSWERS: dict[str, Any] = {
    "octavo::quantize": _quantize,
    "octavo::quantize_concat": _quantize_concat,
    "octavo::observe": _unseen,
    "aten::detach": _same,
    "aten::alias": _same,
    "aten::as_strided": _as_strided,
    "aten::view": _view,
    "aten::t": _transpose,
    "aten::transpose": _transpose,
}
