"""Situations known from public reports, and models, on the CPU with the references behind PyTorch's operators.

Checks of ``cpu_registry.py``, which runs them in a process of their own.
"""

from __future__ import annotations

import contextlib

import operator_checks
import torch
import torch.nn.functional as F
from cpu_registry import _opinfo, _samples, _taken

from octavo import operators


def specials() -> None:
    """B36: NaN of both signs and infinities: where they rank, indices in range, values and gradients as stock."""
    for dtype in (torch.float32, torch.bfloat16):
        for n, rows in ((4, 8), (2048, 20)):
            x = operator_checks.nasty_rows(n, dtype).repeat(2, 1)[:rows]
            for k in (1, n):
                for largest in (True, False):
                    _special(x, k, largest)
    assert _taken("aten::topk") == 16


def _special(x: torch.Tensor, k: int, largest: bool) -> None:
    stock = torch.topk(x, k, largest=largest)
    leaf = x.clone().requires_grad_()
    with operators.enabled("topk", force=True):
        values, indices = torch.topk(leaf, k, largest=largest)
        values.sum().backward()
    assert operator_checks.same(values.detach(), stock.values)
    assert int(indices.min()) >= 0
    assert int(indices.max()) < x.shape[1]
    assert operator_checks.same(x.gather(1, indices), values.detach())
    assert torch.equal(leaf.grad, torch.zeros_like(x).scatter_(1, indices, 1.0))


def ties() -> None:
    """B39: equal values by the lowest index for every k, in both deterministic modes, every time."""
    small = torch.tensor([1.0, 2, 5, 4, 5])
    zeros = torch.zeros(4096, 64, dtype=torch.bfloat16)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            for k in range(1, 6):
                stock = torch.topk(small, k).values
                with operators.enabled("topk", force=True):
                    got = torch.topk(small, k)
                assert torch.equal(got.values, stock)
                assert got.indices.tolist() == [2, 4, 3, 1, 0][:k]
            with operators.enabled("topk", force=True):
                seen = [torch.topk(zeros, 8).indices for _ in range(20)]
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(indices, torch.arange(8).expand(4096, 8)) for indices in seen)


def gradients() -> None:
    """B44: expanded, strided and transposed gradients of an RMSNorm give what contiguous ones give."""
    x = torch.randn(2, 64, 256, dtype=torch.bfloat16)
    wide, turned = (
        torch.randn(2, 64, 512, dtype=torch.bfloat16),
        torch.randn(2, 256, 64, dtype=torch.bfloat16),
    )
    grads = {
        "expanded": torch.ones((), dtype=torch.bfloat16).expand(2, 64, 256),
        "strided": wide[..., ::2],
        "transposed": turned.transpose(1, 2),
    }
    for dtype in (torch.bfloat16, torch.float32):
        w = torch.randn(256, dtype=dtype)
        for name, grad in grads.items():
            found = []
            for g in (grad, grad.contiguous()):
                leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
                with operators.enabled("rms_norm", force=True):
                    y = F.rms_norm(leaves[0], (256,), leaves[1], 1e-6)
                    y.backward(
                        g.to(y.dtype) if name != "expanded" else g.contiguous().to(y.dtype).expand_as(y)
                    )
                found.append([leaf.grad for leaf in leaves])
            for a, b in zip(*found):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2, msg=f"{name} {dtype}")
    # A weight of another dtype never reaches the fused operator: PyTorch computes it from elementary ones.
    assert _taken("aten::_fused_rms_norm") == _taken("aten::_fused_rms_norm_backward") == 6


def autocast() -> None:
    """B45: a norm after an autocast linear layer, no weight, no eps, several dimensions, a zero row, large float16."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.RMSNorm(4))
    x = torch.randn(3, 4)
    found = []
    for on in (False, True):
        model.zero_grad()
        with operators.enabled("rms_norm", force=True) if on else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            y.float().sum().backward()
            several = F.rms_norm(x.view(1, 3, 4), (3, 4))
            large = F.rms_norm(torch.full((2, 8), 300.0, dtype=torch.float16), (8,))
            zero = F.rms_norm(torch.zeros(2, 8), (8,))
        assert model[1].weight.grad.dtype == torch.float32
        found.append((y.detach(), model[1].weight.grad.clone(), several, large, zero))
    for off, on in zip(*found):
        assert off.dtype == on.dtype
        torch.testing.assert_close(on, off)
    assert torch.equal(found[1][3], torch.ones(2, 8, dtype=torch.float16))
    assert torch.equal(found[1][4], torch.zeros(2, 8))
    # Which path ran is what status() counts: three calls without a weight; the mixed one is not the operator's.
    assert _taken("aten::_fused_rms_norm") == 3


def opinfo_out_and_errors() -> None:
    """PyTorch's own samples of topk with out=, and the errors that its tables expect, on and off."""
    for op, sample in _samples("topk", torch.float32, requires_grad=False):
        arguments = (sample.input, *sample.args)
        expected = op(*arguments, **sample.kwargs)
        for resize in (False, True):
            out = tuple(torch.empty(0 if resize else t.shape, dtype=t.dtype) for t in expected)
            with operators.enabled("topk", force=True):
                returned = op(*arguments, **sample.kwargs, out=out)
            for given, got, want in zip(out, returned, expected):
                assert got is given
                assert got.stride() == want.stride()
            assert torch.equal(out[0], expected[0])
    assert _taken("aten::topk.values") > 3
    count = 0
    for name in ("topk", "nn.functional.rms_norm"):
        op = _opinfo(name)
        for error in op.error_inputs("cpu") if op.error_inputs_func is not None else ():
            sample, found = error.sample_input, []
            for on in (False, True):
                with operators.enabled(force=True) if on else contextlib.nullcontext():
                    try:
                        op(sample.input, *sample.args, **sample.kwargs)
                    except error.error_type as caught:
                        found.append((type(caught), str(caught)))
            assert len(found) == 2, f"{name} raises no {error.error_type}"
            assert found[0] == found[1]
            count += 1
    assert count > 0


def transformers_models() -> None:
    """A small Llama and Mixtral run unchanged: same outputs and gradients; the router's topk is taken, and, where
    their norms are told to use F.rms_norm, those are too."""
    import transformers

    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    tokens = torch.randint(0, 100, (2, 12))
    for name, norms in (("Llama", 5), ("Mixtral", 5)):
        operators.reset_counts()
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        expected = _step(model, tokens)
        with operators.enabled(force=True):
            got = _step(model, tokens)
        for a, b in zip(got, expected):
            assert torch.equal(a, b)
        assert _taken("aten::topk") == (2 if name == "Mixtral" else 0)
        assert _taken("aten::_fused_rms_norm") == 0, "transformers' norms do not call F.rms_norm"
        with operators.enabled(force=True), operators.fuse_rms_norms(model) as left:
            fused = _step(model, tokens)
        assert left == {}
        for a, b in zip(fused, expected):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert _taken("aten::_fused_rms_norm") == _taken("aten::_fused_rms_norm_backward") == norms


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(tokens, labels=tokens)
    output.loss.backward()
    return [output.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


CHECKS = {
    f.__name__: f for f in (specials, ties, gradients, autocast, opinfo_out_and_errors, transformers_models)
}
