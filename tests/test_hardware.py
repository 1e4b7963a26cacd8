"""What the package says of the machine: architecture, FP8 family, versions."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from octavo import hardware, quantize
from octavo.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, MXFP8, Format
from octavo.hardware import architecture, assume_architecture, fp8_family, native_format


def test_cpu_and_meta() -> None:
    assert architecture("cpu") == "cpu"
    assert architecture(torch.device("meta")) == "meta"
    assert fp8_family("cpu") == fp8_family("meta") == "ocp"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gfx940", "fnuz"),
        ("gfx941", "fnuz"),
        ("gfx942", "fnuz"),
        ("gfx950", "ocp"),
        ("sm_90", "ocp"),
        ("sm_100", "ocp"),
    ],
)
def test_family_follows_the_architecture(name: str, family: str) -> None:
    with assume_architecture(name):
        assert architecture("cuda") == architecture("cuda:1") == name
        assert fp8_family("cuda:0") == family
        element = {"fnuz": E4M3FNUZ, "ocp": E4M3FN}[family]
        assert native_format(Format(E4M3FN, "rowwise"), "cuda") == Format(element, "rowwise")
        assert native_format(Format(E4M3FNUZ, "rowwise"), "cuda") == Format(element, "rowwise")
        assert native_format(MXFP8, "cuda") == MXFP8
        # The assumption is about GPUs: tensors on the CPU stay what they are.
        assert native_format(Format(E5M2FNUZ, "1x128"), "cpu") == Format(E5M2, "1x128")


def _assume_and_fail() -> None:
    with assume_architecture("gfx942"):
        assert architecture("cuda") == "gfx942"
        raise RuntimeError("boom")


def test_assumptions_nest_and_end_with_an_error() -> None:
    with assume_architecture("gfx950"):
        with pytest.raises(RuntimeError, match="boom"):
            _assume_and_fail()
        assert architecture("cuda") == "gfx950"
    assert hardware._assumed == []


@pytest.mark.case("B06")
def test_B06_environment_lists_do_not_choose_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PYTORCH_ROCM_ARCH", "GPU_ARCHS", "HIP_ARCHITECTURES"):
        monkeypatch.setenv(variable, "gfx942;gfx950")
    for name, element in (("gfx942", E4M3FNUZ), ("gfx950", E4M3FN)):
        with assume_architecture(name):
            assert native_format(Format(E4M3FN, "tensorwise"), "cuda").element is element


@pytest.mark.case("B06")
def test_B06_amax_300_in_e4m3fnuz() -> None:
    x = torch.tensor([[300.0, -300.0, 150.0, 0.0]])
    q = quantize(x, Format(E4M3FNUZ, "tensorwise"))
    assert q.scale.item() == 1.25
    assert q.data.float().tolist() == [[240.0, -240.0, 120.0, 0.0]]
    assert q.data.view(torch.uint8).tolist() == [[0x7F, 0xFF, 0x77, 0x00]]


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.0"])
def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=f"needs PyTorch 2.11 or newer and found {version.split('+')[0]}"):
        hardware.check_torch_version()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1", "2.14.0a0+git1234"])
def test_tested_torch_is_silent(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hardware.check_torch_version()


@pytest.mark.parametrize("version", ["2.15.0.dev20261001+cu130", "3.0.0"])
def test_newer_torch_warns(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match="newer than the newest one Octavo was tested with"):
        hardware.check_torch_version()


def test_reasons_for_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "interpreted", lambda: False)
    monkeypatch.setattr(hardware, "has_triton", lambda: False)
    assert "pip install 'octavo[triton]'" in str(hardware.why_no_triton(torch.device("cpu")))
    monkeypatch.setattr(hardware, "has_triton", lambda: True)
    assert "the tensor is on the CPU" in str(hardware.why_no_triton(torch.device("cpu")))
    with assume_architecture("sm_70"):
        assert "not for sm_70" in str(hardware.why_no_triton(torch.device("cuda")))
    with assume_architecture("gfx950"):
        assert hardware.why_no_triton(torch.device("cuda")) is None


def test_versions_and_devices() -> None:
    found = hardware.versions()
    assert found["torch"] == torch.__version__
    assert found["python"] == sys.version.split()[0]
    first, *gpus = hardware.devices()
    assert (first["device"], first["architecture"], first["native_fp8_matmul"]) == ("cpu", "cpu", False)
    assert len(gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
