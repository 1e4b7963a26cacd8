"""RMSNorm in FlyDSL: compiled for gfx950 without a GPU and executed on the CPU against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="octavo check needs Triton")
from flydsl_helpers import cases, findings, needs_flydsl, run

from octavo.operators.rms_norm.reference import fused_rms_norm

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
pytestmark = [pytest.mark.amd, needs_flydsl]

EPS = 1e-6


def execute(
    x: torch.Tensor, weight: torch.Tensor | None, stride: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    from octavo.flydsl.rms_norm_kernels import rms_norm_case

    m, n = x.shape
    case = rms_norm_case(n, weight is not None)
    wide = torch.full((m, stride or n), float("nan"), dtype=torch.bfloat16)
    wide[:, :n] = x
    y, rstd = np.full((m, n), np.nan, ml_dtypes.bfloat16), np.full(m, np.nan, np.float32)
    source = array(wide)
    run(case, (m,), [source, array(weight if weight is not None else x[0]), y, rstd, stride or n, EPS])
    return torch.from_numpy(y.view(np.int16)).view(torch.bfloat16), torch.from_numpy(rstd)


def array(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def check(x: torch.Tensor, weight: torch.Tensor | None, stride: int | None = None) -> None:
    """rstd within two units in the last place of float32; y the bits that the kernel's own rstd gives."""
    y, rstd = execute(x, weight, stride)
    _, expected = fused_rms_norm(x, [x.shape[1]], weight, EPS)
    torch.testing.assert_close(rstd, expected[:, 0], rtol=2.0**-22, atol=0, equal_nan=True)
    wanted = x.float() * rstd[:, None]
    wanted = wanted if weight is None else wanted * weight.float()
    torch.testing.assert_close(y, wanted.bfloat16(), rtol=0, atol=0, equal_nan=True)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("columns", [1, 7, 64, 1001, 1024, 2040, 4096, 5000, 8192])
def test_rows_of_every_kind(columns: int) -> None:
    check(normal(3, columns), 1 + normal(columns, seed=1) / 8)


def test_without_weight_and_with_rows_apart() -> None:
    check(normal(5, 512), None)
    check(normal(5, 512), normal(512, seed=1), stride=640)


def test_values_at_the_ends() -> None:
    """Zero rows, subnormals, rows whose squares overflow float32, infinities and NaN."""
    x = normal(6, 264)
    x[0], x[1], x[2] = 0, 1e-39, 3e38
    x[3, 5], x[4, 263] = float("inf"), float("nan")
    check(x, None)


def test_what_check_asks_of_each_configuration() -> None:
    found = {case.name: findings(case) for case in cases("rms_norm_kernels")}
    assert len(found) == 7
    assert not any(found.values()), found


def test_launch_code_runs_whole_and_the_operator_takes_it_where_it_is_named() -> None:
    """Views, leading dimensions and rows at odd addresses; PyTorch's override calls what use_kernels names."""
    import octavo
    from octavo.check.gcn.torch_launch import executing
    from octavo.operators import rms_norm

    base = normal(2, 3, 520)
    weight = 1 + normal(512, seed=1) / 8
    inputs = (base[..., 8:], base[..., 1:513], base[:, 1, :512], normal(512))
    with octavo.use_kernels(rms_norm="flydsl"), executing("gfx950") as reports:
        for x in inputs:
            arguments = (x, [512], weight, EPS)
            assert rms_norm.why_not_forward(*arguments) is None
            y, rstd = rms_norm.fused_rms_norm(*arguments)
            wanted, expected = fused_rms_norm(*arguments)
            assert (y.shape, rstd.shape) == (wanted.shape, expected.shape)
            torch.testing.assert_close(rstd, expected, rtol=2.0**-22, atol=0)
            torch.testing.assert_close(y, wanted, rtol=2.0**-7, atol=0)
        refused = rms_norm.why_not_forward(base.float(), [520], None, EPS)
    assert len(reports) == len(inputs)
    assert refused == "the FlyDSL kernel takes bfloat16 alone"


def test_every_flydsl_case_has_a_budget_and_no_budget_is_stale() -> None:
    from octavo.check import budget, catalog
    from octavo.hardware import flydsl_version

    names = {e.name for e in catalog.entries("gfx950") if e.case.language == "flydsl"}
    release = ".".join(map(str, flydsl_version()))
    assert names == set(budget.read(budget.book("gfx950", "flydsl"))[release])
