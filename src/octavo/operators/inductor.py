"""The only file that touches Inductor: lowerings that let a compiled call reach our kernels, and choices of products.

Most operators need nothing: Inductor calls ``_grouped_mm``, ``_scaled_grouped_mm`` and ``_scaled_mm`` through the
dispatcher at run time, or they are its own Triton templates. ``_scaled_mm_v2`` with MX scales is one it refuses while
lowering (PyTorch 2.13: no template, and an assertion against swizzled scales); it becomes a call of the operator.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

BLOCKWISE_1X32 = 3
"""``torch.nn.functional.ScalingType.BlockWise1x32``."""


def call_instead(operator: Any, when: Any) -> bool:
    """Lower ``operator`` to a call of itself where ``when`` says so of its arguments; False if it has no lowering.

    A graph that stock Inductor could not lower stays one that it cannot, cached or not: where the call finds no kernel
    of ours it meets PyTorch's own, with its own error.
    """
    from torch._inductor import lowering

    stock = lowering.lowerings.get(operator)
    if stock is None:
        return False  # then it is called through the dispatcher already
    if getattr(stock, "_octavo", False):
        return True
    fallback = lowering.fallback_handler(operator, add_to_fallback_set=False)

    @functools.wraps(stock)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        return (fallback if when(*args, **kwargs) else stock)(*args, **kwargs)

    lowered._octavo = True  # type: ignore[attr-defined]
    lowering.lowerings[operator] = lowered
    return True


def _is_mx(
    a: Any, b: Any, scale_a: Any, recipe_a: Sequence[int], swizzle_a: Any, scale_b: Any, recipe_b: Sequence[int],
    *_: Any, **__: Any,
) -> bool:  # fmt: skip
    return BLOCKWISE_1X32 in (*recipe_a, *recipe_b)


def call_mx_products() -> bool:
    """Let compiled ``F.scaled_mm`` with MX operands reach the dispatcher; see ``call_instead``."""
    operator = getattr(torch.ops.aten, "_scaled_mm_v2", None)
    return operator is not None and call_instead(operator.default, _is_mx)


# ---- choices of products ----------------------------------------------------------------------------------------
#
# Inductor asks a choices handler, one a thread, for the ways to lower a product; its method _finalize_template_configs
# may add to them (PyTorch 2.11 to 2.14). Handlers of ours stay once installed and answer as stock ones while nothing
# is offered. Inductor's configuration names the factory of handlers, and the cache key of a compiled graph holds the
# configuration: by the factory's pickled fields on 2.11, by its handler's uuid() from 2.13. So a graph compiled with
# these offers is found only where the same ones were made, and its kernels are registered there before it is loaded.

_SEAM = ("self", "template_choices", "kernel_inputs", "templates", "op_name")


@dataclass(frozen=True)
class Product:
    """A product as it is lowered; sizes and strides that are not known then are None.

    Args:
        operator: ``"mm"`` or ``"addmm"``.
        tuned: whether choices are timed (``max_autotune``).
        device, dtype: of every operand and of the result; dtype is None where they differ.
        sizes: (M, N, K).
        strides: of the two factors.
        scalars: alpha and beta of addmm.
        blocked: why nothing can be offered however it is multiplied, or None.
    """

    operator: str
    tuned: bool
    device: torch.device
    dtype: torch.dtype | None
    sizes: tuple[int | None, int | None, int | None]
    strides: tuple[tuple[int | None, int | None], tuple[int | None, int | None]]
    scalars: tuple[float, float] = (1, 1)
    blocked: str | None = None


@dataclass(frozen=True)
class Answer:
    """What is offered: the kernel's name, and whether in place of the other choices; or why nothing is."""

    kernel: str | None = None
    alone: bool = False
    reason: str | None = None


Decide = Callable[[Product], Answer]

_decide: Decide | None = None
_kernels: dict[str, Any] = {}


@dataclass(frozen=True)
class Handlers:
    """The factory that Inductor's configuration names; ``key`` is what compiled graphs depend on."""

    key: str
    base: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        """A handler like the one that would be there without Octavo, which also makes our offers."""
        from torch._inductor.choices import InductorChoices

        handler: Any = InductorChoices() if self.base is None else self.base()
        handler.__class__ = type("OctavoChoices", (_Offering, type(handler)), {})
        handler.octavo_key = self.key
        return handler


class _Offering:
    """What is put before a handler's class."""

    octavo_key: str

    def _finalize_template_configs(
        self,
        template_choices: Any,
        kernel_inputs: Any,
        templates: Any,
        op_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        stock = super()._finalize_template_configs(  # type: ignore[misc]
            template_choices, kernel_inputs, templates, op_name, *args, **kwargs
        )
        return _with_offer(stock, kernel_inputs, templates, op_name)

    def uuid(self) -> str:
        """What the cache key of a compiled graph holds of the handler."""
        base = getattr(super(), "uuid", None)
        return f"{self.octavo_key}:{'' if base is None else base()}"


@functools.cache
def why_no_choices() -> str | None:
    """Why products cannot be offered to this PyTorch's Inductor, or None if they can."""
    try:
        from torch._inductor import config
        from torch._inductor.choices import InductorChoices
        from torch._inductor.kernel import mm
        from torch._inductor.kernel_template_choice import (
            DictKernelTemplateParams,  # pyright: ignore[reportPrivateImportUsage]
            make_ktc_generator,
        )
        from torch._inductor.select_algorithm import ExternKernelChoice
        from torch._inductor.utils import use_aten_gemm_kernels
        from torch._inductor.virtualized import V

        seam = InductorChoices._finalize_template_configs
        assert all((DictKernelTemplateParams, make_ktc_generator, ExternKernelChoice, use_aten_gemm_kernels))
        assert all((V.set_choices_handler, mm.mm_template))
    except (ImportError, AttributeError) as error:
        return f"Inductor of PyTorch {torch.__version__} has another seam for choices: {error}"
    if not hasattr(config, "inductor_choices_class"):
        return f"Inductor of PyTorch {torch.__version__} has no inductor_choices_class in its cache key"
    found = tuple(inspect.signature(seam).parameters)
    if found[: len(_SEAM)] != _SEAM:
        return f"Inductor of PyTorch {torch.__version__} hands choices on as {found}, not as {_SEAM}"
    return None


def register_products(kernels: Mapping[str, Callable[..., torch.Tensor]], key: str) -> None:
    """Make kernels known to Inductor, by name and once, so that compiled graphs find them.

    Args:
        kernels: each called with the operands and ``out=``.
        key: what their timings depend on beside their names, such as a version.
    """
    from torch._inductor.select_algorithm import ExternKernelChoice

    class Choice(ExternKernelChoice):
        def hash_key(self) -> str:
            return f"{super().hash_key()}-{key}"

    for name, kernel in kernels.items():
        if name not in _kernels:
            _kernels[name] = Choice(kernel, name=name, has_out_variant=True)


def offer_products(decide: Decide | None, key: str) -> None:
    """From now on compile products with what ``decide`` offers, or as stock Inductor does if it is None.

    Graphs that are compiled already stay as they are.
    """
    global _decide
    from torch._inductor import config
    from torch._inductor.virtualized import V

    _decide = decide
    named = config.inductor_choices_class
    base = named.base if isinstance(named, Handlers) else named
    config.inductor_choices_class = base if decide is None else Handlers(key, base)
    if decide is not None:
        # The handler of this thread was perhaps made before; other threads make theirs when they compile.
        V.set_choices_handler(Handlers(key, base)())


def _number(size: Any) -> int | None:
    try:
        return int(size)
    except TypeError:  # a symbol
        return None


def _pair(sizes: Sequence[Any]) -> tuple[int | None, int | None]:
    first, second = sizes
    return _number(first), _number(second)


def _why_blocked(tuned: bool) -> str | None:
    from torch._inductor import config
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper or getattr(V.graph, "aot_mode", False):
        return "a C++ wrapper cannot call a kernel in Python"
    if tuned and config.autotune_in_subproc:
        return "choices are timed in another process, where the kernel is not registered"
    return None


def _product_of(kernel_inputs: Any, op_name: str) -> Product:
    from torch._inductor import config

    nodes = kernel_inputs.nodes()
    first, second = nodes[-2:]
    layout = kernel_inputs.output_layout()
    dtypes = {node.get_dtype() for node in nodes} | {layout.dtype}
    (m, k), (_, n) = _pair(first.get_size()), _pair(second.get_size())
    scalars = (1, 1)
    if op_name == "addmm":
        scalars = kernel_inputs.get_scalar("alpha"), kernel_inputs.get_scalar("beta")
    tuned = bool(config.max_autotune or config.max_autotune_gemm)
    return Product(
        op_name, tuned, layout.device, dtypes.pop() if len(dtypes) == 1 else None, (m, n, k),
        (_pair(first.get_stride()), _pair(second.get_stride())), scalars, _why_blocked(tuned),
    )  # fmt: skip


def _is_asked(templates: Sequence[Any], op_name: str) -> bool:
    """Whether this is the one of an operator's calls for choices that asks for PyTorch's own kernel, or, where a user
    left that out, for Triton's."""
    from torch._inductor.kernel import mm
    from torch._inductor.select_algorithm import ExternKernelChoice
    from torch._inductor.utils import use_aten_gemm_kernels

    if use_aten_gemm_kernels():
        return any(isinstance(t, ExternKernelChoice) and t.name == op_name for t in templates)
    return any(t is mm.mm_template for t in templates)


def _with_offer(stock: list[Any], kernel_inputs: Any, templates: Sequence[Any], op_name: str) -> list[Any]:
    if _decide is None or op_name not in ("mm", "addmm") or not _is_asked(templates, op_name):
        return stock
    answer = _decide(_product_of(kernel_inputs, op_name))
    if answer.kernel is None:
        return stock
    from torch._inductor import kernel_template_choice as choices

    parameters: Any = iter([choices.DictKernelTemplateParams({})])  # pyright: ignore[reportPrivateImportUsage]
    ours = choices.make_ktc_generator(
        template=_kernels[answer.kernel], cs=parameters, extra_kwargs={}, overrides={},
        layout=kernel_inputs.output_layout(), inputs=kernel_inputs,
    )  # fmt: skip
    return list(ours) if answer.alone else [*stock, *ours]
