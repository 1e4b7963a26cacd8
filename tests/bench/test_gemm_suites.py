"""The suites of products: their cases on meta data, and the decoding that their baseline does."""

from __future__ import annotations

import torch

from octavo import quantize
from octavo.bench import cases, mx_suite
from octavo.operators.gemm import reference


def test_the_baseline_decodes_as_the_reference_does() -> None:
    for fmt in mx_suite.FORMATS.values():
        x = quantize(torch.randn(130, 256, generator=torch.Generator().manual_seed(0)), fmt)
        got = mx_suite.decode(x.data, x.scale, fmt)
        assert torch.equal(got, reference.decode(x).bfloat16()), fmt


def test_the_published_cases_are_there() -> None:
    groups = [case.group for case in cases.cases("mx")]
    assert [groups.count(name) for name in ("mxfp8", "mxfp4", "bf16_x_mxfp4")] == [17, 17, 20]
    grouped = cases.cases("grouped-bf16")
    assert [case.group for case in grouped].count("ragged") == 5
    assert len(grouped) == 24
    first = next(case for case in cases.cases("mx") if case.case == "M=32 N=4096 K=4096")
    assert first.flops == 2 * 32 * 4096 * 4096
    assert first.bytes == (32 + 4096) * (4096 + 128) + 32 * 4096 * 2
