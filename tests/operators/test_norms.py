"""Making a model's own RMSNorm modules call F.rms_norm: which are changed, which left, and that all is put back."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.operators import fuse_rms_norms


class LlamaRMSNorm(torch.nn.Module):
    """As transformers writes it: rounds to the input's dtype, then multiplies by the weight."""

    offset, scale_eps = 0.0, 1.0

    def __init__(self, n: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(1)))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = x.float()
        variance = f.pow(2).mean(-1, keepdim=True) + self.variance_epsilon * self.scale_eps
        return (self.offset + self.weight) * (f * torch.rsqrt(variance)).to(x.dtype)


class GemmaRMSNorm(LlamaRMSNorm):
    offset = 1.0


class OddRMSNorm(LlamaRMSNorm):
    scale_eps = 2.0


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * gate


class TwoRMSNorm(LlamaRMSNorm):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.bias = torch.nn.Parameter(torch.zeros(n))


def test_only_plain_norms_are_changed_and_all_are_put_back() -> None:
    model = torch.nn.ModuleDict(
        {
            "plain": LlamaRMSNorm(32),
            "gemma": GemmaRMSNorm(32),
            "odd": OddRMSNorm(32),
            "gated": GatedRMSNorm(32),
            "two": TwoRMSNorm(32),
            "patched": LlamaRMSNorm(32),
            "torch": torch.nn.RMSNorm(32),
        }
    )
    model["patched"].forward = lambda x: x
    with fuse_rms_norms(model) as left:
        assert set(left) == {"gemma", "odd", "gated", "two", "patched"}
        assert "1 + weight, another eps" in left["gemma"]
        assert "another eps" in left["odd"]
        assert "cannot be called with one tensor" in left["gated"]
        assert "forward was replaced" in left["patched"]
        assert "forward" in vars(model["plain"])
    assert [name for name, module in model.items() if "forward" in vars(module)] == ["patched"]


def test_results_are_those_documented() -> None:
    norm = LlamaRMSNorm(256)
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    own = norm(x)
    with fuse_rms_norms(norm):
        torch.testing.assert_close(norm(x), own, rtol=2e-6, atol=1e-7)
        assert norm(x.bfloat16()).dtype == own.dtype, (
            "another dtype than the weight's goes the module's own way"
        )
    norm, x = norm.bfloat16(), x.bfloat16()
    exact = F.rms_norm(x.double(), (256,), norm.weight.double(), 1e-6).detach()
    unit = 2.0 ** (exact.abs().log2().floor() - 7)
    with torch.no_grad():
        own = (norm(x).double() - exact).abs() / unit
        with fuse_rms_norms(norm):
            fused = (norm(x).double() - exact).abs() / unit
    assert fused.max() <= 0.51, "rounded once"
    assert fused.max() < own.max() <= 1.5


def test_gradients_reach_the_weight() -> None:
    norm = LlamaRMSNorm(16)
    x = torch.randn(4, 16)
    norm(x).sum().backward()
    expected, norm.weight.grad = norm.weight.grad, None
    with fuse_rms_norms(norm):
        norm(x).sum().backward()
    assert norm.weight.grad is not None
    torch.testing.assert_close(norm.weight.grad, expected, rtol=1e-5, atol=1e-6)


def test_a_meta_model_is_left_and_said_so() -> None:
    model = torch.nn.Sequential(LlamaRMSNorm(4).to("meta"))
    with fuse_rms_norms(model) as left:
        assert "meta device" in left["0"]
