"""B54: importing the package is silent and loads nothing that is optional, slow or on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

LOADED = """
import json, sys, torch
before = set(sys.modules)
import octavo
octavo.hardware.versions(), octavo.hardware.has_triton(), octavo.hardware.has_flydsl()
print(json.dumps({"new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
"""
WITHOUT_OPTIONAL = """
import sys
for name in ("triton", "flydsl", "torchao", "torchtitan", "transformers", "vllm"):
    sys.modules[name] = None  # importing it fails, and importlib finds no spec
import torch, octavo
q = octavo.quantize(torch.ones(3, 64), octavo.MXFP8)
assert octavo.scaled_mm(q, q).tolist() == [[64.0] * 3] * 3
assert not octavo.hardware.has_triton()
"""


def _python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.case("B54")
def test_B54_import_is_silent_with_warnings_as_errors() -> None:
    done = _python("import octavo", "-W", "error")
    if (done.returncode, done.stdout, done.stderr) != (0, "", ""):
        baseline = _python("import torch", "-W", "error")
        if baseline.returncode or baseline.stderr:
            pytest.skip(f"torch alone is not silent here: {baseline.stderr.strip()[-200:]}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """Modules that came with the package (and with asking it for versions) beyond torch's own, and CUDA's state."""
    done = _python(LOADED)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.case("B54")
def test_B54_import_loads_no_kernel_language_and_no_cuda(loaded: dict[str, Any]) -> None:
    roots = {name.partition(".")[0] for name in loaded["new"]}
    assert not roots & {"triton", "flydsl", "torchao", "torchtitan", "transformers", "vllm"}
    assert loaded["cuda"] is False


def test_import_loads_nothing_slow(loaded: dict[str, Any]) -> None:
    """What would break the 0.3 s beyond torch: the command line, plotting, and torch's compilers."""
    new = loaded["new"]
    roots = {name.partition(".")[0] for name in new}
    assert not roots & {"typer", "rich", "matplotlib", "numpy", "sympy", "pytest", "hypothesis", "ml_dtypes"}
    heavy = [n for n in new if n.startswith(("torch._dynamo", "torch._inductor", "torch.distributed.tensor"))]
    assert heavy == []


@pytest.mark.case("B54")
def test_B54_works_without_any_optional_package() -> None:
    done = _python(WITHOUT_OPTIONAL, "-W", "error::UserWarning")
    assert (done.returncode, done.stderr) == (0, "")
