"""Versions of TorchTitan and PyTorch outside of those supported are refused with what to install."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent / "integrations" / "torchtitan" / "versions.py"


@pytest.fixture(scope="module")
def versions():
    """The module by its file: importing the package imports TorchTitan."""
    spec = importlib.util.spec_from_file_location("octavo_titan_versions", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("torchtitan", ["0.3.0", "0.3.1rc1", "0.3.7+local"])
@pytest.mark.parametrize("torch", ["2.14.1", "2.15.0.dev20260101", "3.0"])
def test_supported(versions, torchtitan: str, torch: str) -> None:
    versions.check(torchtitan, torch)


@pytest.mark.parametrize("torchtitan", ["0.2.2", "0.4.0", "1.0", "none", "unknown"])
def test_other_torchtitans_are_refused(versions, torchtitan: str) -> None:
    with pytest.raises(ImportError, match=rf"found {torchtitan}: pip install 'torchtitan==0.3.0'"):
        versions.check(torchtitan, "2.14.1")


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.11.0"])
def test_older_pytorch_is_refused(versions, torch: str) -> None:
    with pytest.raises(ImportError, match=r"2\.14 or newer"):
        versions.check("0.3.0", torch)
