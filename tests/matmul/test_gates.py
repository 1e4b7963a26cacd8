"""Refusals that depend on the card and on Triton's version."""

import pytest

from octavo import hardware, info


@pytest.mark.parametrize(("version", "refused"), [((3, 6), True), ((3, 7), False), ((3, 9), False)])
def test_e5m2_by_e4m3_is_left_to_others_on_mi300_before_triton_3_7(monkeypatch, version, refused):
    monkeypatch.setattr(hardware, "triton_version", lambda: version)
    shapes = [(512, 256), (256, 256)]
    for arch in ("gfx942", "gfx950"):
        verdicts = info.explain("scaled_mm", shapes, recipe="tensorwise", product="grad_input", arch=arch)
        reason = next(v.reason for v in verdicts if v.kernel == "triton")
        assert bool(reason and "e5m2 by e4m3" in reason) == (refused and arch == "gfx942")


def test_version_of_the_installed_triton_is_two_numbers():
    major, minor = hardware.triton_version()
    assert (major, minor) == (0, 0) or (major >= 3 and minor >= 0)
