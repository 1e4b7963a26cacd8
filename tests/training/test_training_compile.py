"""torch.compile: one graph, the bits of eager mode, few compilations, one quantization of one input."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from training_support import (
    ALL_RECIPES,
    QUANTIZED_RECIPES,
    assert_all_equal,
    make_net,
    run_linear,
    run_net,
)

import octavo
from octavo.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, MXFP8, Format
from octavo.testing import sqnr


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


SLOW_BUT = [
    r if r in ("rowwise", "mxfp8") else pytest.param(r, marks=pytest.mark.slow) for r in QUANTIZED_RECIPES
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_a_compiled_model_equals_the_eager_one(recipe: str) -> None:
    net = make_net(recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for tokens in (16, 24, 40, 17, 33, 130, 300, 5):
        x = torch.randn(2, tokens, 64)
        assert_all_equal(run_net(net, x, compiled), run_net(net, x))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("recipe", SLOW_BUT)
def test_eight_token_counts_take_at_most_three_compilations(recipe: str) -> None:
    net = octavo.Linear(64, 48, recipe=recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for tokens in (16, 24, 40, 17, 33, 130, 300, 5):
        x = torch.randn(tokens, 64)
        assert_all_equal(run_net(net, x, compiled), run_net(net, x))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("recipe", ["mxfp8"])
def test_a_single_token_among_others_takes_one_compilation_more(recipe: str) -> None:
    # PyTorch specialises on a size of one, and a count of blocks of 32 is one up to 32 tokens.
    net = octavo.Linear(64, 48, recipe=recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for tokens in (64, 128, 17, 1):
        run_net(net, torch.randn(tokens, 64), compiled)
    assert counter.frame_count <= 4


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_a_dimension_marked_dynamic_is_compiled_once(recipe: str) -> None:
    net = octavo.Linear(64, 48, recipe=recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for tokens in (64, 40, 128, 33):
        x = torch.randn(tokens, 64)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x).sum().backward()
    assert counter.frame_count == 1


def test_inductor_agrees_with_eager() -> None:
    net = make_net("rowwise", torch.bfloat16)
    compiled = torch.compile(net, fullgraph=True)
    x = torch.randn(32, 64).bfloat16()
    # Inductor computes silu and its gradient in float32, eager rounds between: the codes may differ in places.
    for found, expected in zip(run_net(net, x, compiled), run_net(net, x), strict=True):
        assert sqnr(found, expected) > 30


def test_compiled_under_autocast_equals_eager() -> None:
    net = make_net()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)

    def run(call) -> list[torch.Tensor]:
        def inside(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return call(x).float()

        return run_net(net, torch.ones(8, 64), inside)

    assert_all_equal(run(compiled), run(net))


@pytest.mark.parametrize("freeze", ["down"])
def test_frozen_layers_compile_without_their_product(freeze: str) -> None:
    net = make_net()
    getattr(net, freeze).weight.requires_grad_(False)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 64)
    assert_all_equal(run_net(net, x, compiled), run_net(net, x))


VALUES = (448.0, 464.0, 465.0, 1000.0, -1000.0, 1e30, -1e30, 0.0)


@pytest.mark.case("B02")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fmt",
    [Format(e, "tensorwise") for e in (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ)]
    + [
        Format(E4M3FN, "rowwise", "power_of_two"),
        Format(E4M3FN, "1x128"),
        MXFP8,
        Format(E4M3FN, "1x32", "floor"),
    ],
    ids=str,
)
def test_b02_out_of_range_values_alike_in_eager_and_compiled(fmt: Format, dtype: torch.dtype) -> None:
    finite = torch.tensor([VALUES] * 2, dtype=dtype)
    for special in (None, float("nan"), float("inf"), -float("inf")):
        x = finite.clone()
        if special is not None:
            x[0, 3] = special

        def codes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            both = octavo.quantize_both(x, fmt)
            return tuple(t for q in both for t in (q.data.view(torch.uint8), q.scale, octavo.dequantize(q)))

        found = torch.compile(codes, backend="aot_eager", fullgraph=True)(x)
        for a, b in zip(found, codes(x), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        decoded = found[2]
        if special is None:
            assert decoded.isfinite().all()
            # The largest magnitude may round up, by half a step at most.
            step = 2.0**-fmt.element.mantissa_bits
            assert decoded.abs().max() <= x.float().abs().max() * (1 + step / 2)
        else:
            row = decoded if fmt.granularity == "tensorwise" else decoded[:1]
            assert row.isnan().all()
            if fmt.granularity != "tensorwise":
                assert decoded[1].isfinite().all()


@pytest.mark.case("B02")
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_b02_a_linear_layer_never_turns_large_values_into_nan(recipe: str) -> None:
    x = torch.randn(8, 64) * 1e6
    net = octavo.Linear(64, 48, recipe=recipe)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = run_net(net, x, compiled)
    assert all(t.isfinite().all() for t in found)
    assert_all_equal(found, run_net(net, x))


@pytest.mark.case("B27")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 0), (0, 16, 16), (16, 0, 16)])
def test_b27_compiled_zero_lengths_give_zeros(recipe: str, m: int, n: int, k: int) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return octavo.linear(x, weight, recipe=recipe)

    x, weight = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(x, weight)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(m, n))
    assert torch.equal(x.grad, torch.zeros(m, k))
    assert torch.equal(weight.grad, torch.zeros(n, k))


class Projections(nn.Module):
    """q, k and v of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n, bias=False) for n in (64, 32, 32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)


def graphs_of_projections(recipe: str) -> list[torch.fx.Graph]:
    """Forward and backward graph of converted projections, by the partitioner that Inductor uses; it eliminates
    common subexpressions of the joint graph."""
    graphs = []

    def record(module: torch.fx.GraphModule, _: object):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition
    )
    model = Projections()
    octavo.convert(model, recipe)
    q, k, v = torch.compile(model, backend=backend, fullgraph=True)(
        torch.randn(2, 16, 64, requires_grad=True)
    )
    (q.square().sum() + k.square().sum() + v.square().sum()).backward()
    return graphs


@pytest.mark.case("B29")
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_b29_three_projections_quantize_their_input_once(recipe: str) -> None:
    forward, backward = (activation_quantizations(graph) for graph in graphs_of_projections(recipe))
    assert forward == 1
    # Each projection has a gradient of its own.
    assert backward == 3


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_weights_are_quantized_for_backward_in_backward(recipe: str) -> None:
    """Else the compiled forward would keep an 8-bit copy of every weight for it."""
    turned = [
        sum(str(n.target) == "octavo.quantize.default" and n.args[2] is True for n in graph.nodes)
        for graph in graphs_of_projections(recipe)
    ]
    assert turned == [0, 3]


def activation_quantizations(graph: torch.fx.Graph) -> int:
    """Quantize nodes whose operand is not a parameter of the graph itself."""
    return sum(
        str(node.target).startswith("octavo.quantize") and node.args[0].op != "placeholder"
        for node in graph.nodes
    )


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_the_function_compiles_with_its_recipe(recipe: str) -> None:
    x, weight, bias, grad = torch.randn(6, 64), torch.randn(32, 64), torch.randn(32), torch.randn(6, 32)

    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return octavo.linear(x, weight, bias, recipe=recipe)

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves)
    out.backward(grad)
    expected = run_linear(x, weight, bias, grad, recipe)
    assert_all_equal([out.detach(), *(t.grad for t in leaves)], list(expected))
