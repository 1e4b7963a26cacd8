"""Missing waits and barriers are reported, one rule at a time; correct code reports nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gcn_helpers import both_targets, execute
from test_gcn_memory import run

from octavo.check.gcn import ExecutionError

pytestmark = pytest.mark.amd


def kinds(text: str, target: str, **options: Any) -> list[str]:
    return [r.kind for r in execute(text, target, **options).tracker.races.values()]


LOADS = "s_mov_b64 s[20:21], s[4:5]\nglobal_load_dword v4, v1, s[4:5]\nglobal_load_dword v5, v1, s[4:5]\n"


@both_targets
@pytest.mark.parametrize(
    ("after", "raced"),
    [
        ("s_waitcnt vmcnt(1)\nv_mov_b32_e32 v6, v4", False),  # loads return in order: the first is there
        ("s_waitcnt vmcnt(1)\nv_mov_b32_e32 v6, v5", True),
        ("s_waitcnt vmcnt(0)\nv_mov_b32_e32 v6, v5", False),
        ("s_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v6, v5", True),  # the other counter
        ("v_mov_b32_e32 v5, 0", True),  # the load would overwrite the new value
        ("global_load_dword v5, v1, s[4:5] offset:4\ns_waitcnt vmcnt(0)", False),  # in order again
        ("ds_read_b32 v5, v1\ns_waitcnt lgkmcnt(0) vmcnt(0)", True),  # different counters have no order
        ("global_store_dword v1, v4, s[6:7]", True),  # data not loaded yet
        ("global_load_lds_dword v4, s[4:5]", True),  # address not loaded yet
        ("global_load_dword v6, v4, s[4:5]", True),
        ("v_add_f32_e32 v6, v7, v8", False),
    ],
)
def test_vector_loads(after: str, raced: bool, target: str) -> None:
    setup = "s_mov_b32 m0, 0\n"
    report = run(setup + LOADS + after, target, np.zeros(80, np.uint32), np.zeros(64, np.uint32), lds=256)
    assert [r.kind for r in report.races] == (["register"] if raced else [])


@both_targets
@pytest.mark.parametrize(
    ("wait", "raced"),
    [("s_waitcnt lgkmcnt(0)", False), ("s_waitcnt lgkmcnt(1)", True), ("s_waitcnt vmcnt(0)", True)],
)
def test_scalar_loads_return_out_of_order(wait: str, raced: bool, target: str) -> None:
    body = f"s_load_dword s20, s[4:5], 0x0\ns_load_dword s21, s[4:5], 0x4\n{wait}\ns_mov_b32 s22, s20"
    races = run(body, target, np.zeros(64, np.uint32)).races
    assert bool(races) == raced
    assert all("s20" in r.detail and "s_mov_b32" in r.instruction for r in races)


@both_targets
def test_permutes_need_a_wait(target: str) -> None:
    assert kinds("ds_bpermute_b32 v0, v1, v2\nv_mov_b32_e32 v3, v0", target) == ["register"]
    assert kinds("ds_bpermute_b32 v0, v1, v2\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v3, v0", target) == []


@both_targets
def test_matrix_operands_need_a_wait(target: str) -> None:
    load = "ds_read_b64 v[2:3], v1\nv_mfma_f32_32x32x8_f16 a[0:15], v[4:5], v[2:3], 0"
    assert kinds(load, target, lds=np.zeros(4096, np.uint8), v={1: np.zeros(64, np.uint32)}) == ["register"]


# Two waves; each writes a word for each lane and reads the other wave's.
EXCHANGE = """
ds_write_b32 v1, v0
s_waitcnt lgkmcnt(0)
s_barrier
v_xor_b32_e32 v2, 0x100, v1
ds_read_b32 v3, v2
s_waitcnt lgkmcnt(0)
global_store_dword v1, v3, s[4:5]
"""


@both_targets
def test_exchange_through_lds(target: str) -> None:
    x = np.zeros(128, np.uint32)
    assert not run(EXCHANGE, target, x, lds=512, warps=2).races
    assert (x == np.arange(128) ^ 64).all()


@both_targets
@pytest.mark.parametrize(
    "dropped", ["s_barrier\n", "s_waitcnt lgkmcnt(0)\ns_barrier\n", "s_waitcnt lgkmcnt(0)\n"]
)
def test_exchange_without_wait_or_barrier(dropped: str, target: str) -> None:
    keep = "s_barrier\n" if dropped == "s_waitcnt lgkmcnt(0)\ns_barrier\n" else ""
    text = EXCHANGE.replace(dropped, keep, 1)
    report = run(text, target, np.zeros(128, np.uint32), lds=512, warps=2)
    assert "lds" in [r.kind for r in report.races]
    with pytest.raises(ExecutionError, match="race"):
        report.raise_for_races()


@both_targets
def test_overwriting_what_another_wave_still_reads(target: str) -> None:
    again = EXCHANGE + "ds_write_b32 v1, v3"
    assert [r.kind for r in run(again, target, np.zeros(128, np.uint32), lds=512, warps=2).races] == ["lds"]
    ordered = EXCHANGE + "s_barrier\nds_write_b32 v1, v3"
    assert not run(ordered, target, np.zeros(128, np.uint32), lds=512, warps=2).races


@both_targets
def test_two_waves_write_one_byte(target: str) -> None:
    different = "v_mov_b32_e32 v2, 0\nds_write_b32 v2, v0"
    equal = "v_mov_b32_e32 v2, 0\nv_mov_b32_e32 v3, 5\nds_write_b32 v2, v3"
    first = "v_cmp_eq_u32_e32 vcc, 0, v0\n"
    assert [r.kind for r in run(different, target, lds=4, warps=2).races] == ["lds"]
    assert not run(first + equal, target, lds=4, warps=2).races  # what replicated layouts do


DIRECT = """
s_mov_b32 m0, 0
v_readfirstlane_b32 s12, v1
s_mov_b32 m0, s12
global_load_lds_dword v1, s[4:5]
s_waitcnt vmcnt(0)
s_barrier
v_xor_b32_e32 v2, 0x100, v1
ds_read_b32 v3, v2
s_waitcnt lgkmcnt(0)
global_store_dword v1, v3, s[6:7]
"""


@both_targets
@pytest.mark.parametrize(
    ("change", "raced"),
    [
        (("", ""), False),
        (("s_waitcnt vmcnt(0)\n", ""), True),
        (("s_waitcnt vmcnt(0)", "s_waitcnt lgkmcnt(0)"), True),
        (("s_barrier\n", ""), True),
        (
            ("s_waitcnt vmcnt(0)\ns_barrier\nv_xor_b32_e32 v2, 0x100, v1", "v_mov_b32_e32 v2, v1"),
            True,
        ),  # own load
        (("s_barrier\nv_xor_b32_e32 v2, 0x100, v1", "v_mov_b32_e32 v2, v1"), False),  # own load, waited for
    ],
)
def test_direct_to_lds_loads(change: tuple[str, str], raced: bool, target: str) -> None:
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    report = run(DIRECT.replace(*change) if change[0] else DIRECT, target, x, y, lds=512, warps=2)
    assert [r.kind for r in report.races] == (["lds"] if raced else [])


@both_targets
def test_workgroups_do_not_disturb_each_other(target: str) -> None:
    assert not run(EXCHANGE, target, np.zeros(128, np.uint32), lds=512, warps=2, grid=(50,)).races
