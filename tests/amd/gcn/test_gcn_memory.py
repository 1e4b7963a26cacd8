"""Global memory, buffers, LDS, direct-to-LDS loads, atomics, waits; what is refused and what faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gcn_helpers import both_targets, execute, vector

from octavo.check.compile import Argument, CompiledKernel
from octavo.check.gcn import ExecutionError, MemoryFault, Report, UnsupportedInstruction, launch

pytestmark = pytest.mark.amd

# Loads the first three pointers to s[2:7] and the integer after them to s8; v1 = 4 * lane in the workgroup.
PROLOGUE = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[8:9], s[0:1], 0x10
s_load_dword s10, s[0:1], 0x18
v_lshlrev_b32_e32 v1, 2, v0
s_waitcnt lgkmcnt(0)
"""


def kernel(body: str, target: str, *, warps: int = 1, lds: int = 0, arguments: int = 3) -> CompiledKernel:
    slots = [Argument(8 * i, 8, "global_buffer") for i in range(arguments)] + [
        Argument(8 * arguments, 4, "by_value")
    ]
    return CompiledKernel(
        "hand",
        target,
        PROLOGUE + body + "\ns_endpgm\n",
        b"",
        lds,
        warps,
        kernarg_bytes=64,
        arguments=tuple(slots),
    )


def run(
    body: str, target: str, *arrays: np.ndarray, number: int = 0, grid: tuple[int, ...] = (1,), **options: Any
) -> Report:
    filled = [*arrays, *(np.zeros(1, np.uint32) for _ in range(3 - len(arrays)))]
    return launch(kernel(body, target, **options), grid, [*filled, number])


@both_targets
@pytest.mark.parametrize("words", [1, 2, 3, 4])
def test_global_load_and_store(words: int, target: str) -> None:
    suffix = "" if words == 1 else f"x{words}"
    span = "v4" if words == 1 else f"v[4:{3 + words}]"
    body = f"""
    v_mul_lo_u32 v2, v0, {4 * words}
    global_load_dword{suffix} {span}, v2, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_dword{suffix} v2, {span}, s[6:7]
    """
    x = np.random.default_rng(0).integers(0, 2**32, 64 * words, dtype=np.uint32)
    y = np.zeros_like(x)
    assert not run(body, target, x, y).races
    assert (x == y).all()


@both_targets
@pytest.mark.parametrize(
    ("load", "store", "dtype"),
    [
        ("ubyte", "byte", np.uint8),
        ("ushort", "short", np.uint16),
        ("sbyte", "dword", np.int8),
        ("sshort", "dword", np.int16),
    ],
)
def test_small_loads_extend(load: str, store: str, dtype: Any, target: str) -> None:
    size = np.dtype(dtype).itemsize
    out = dtype if store != "dword" else np.int32
    body = f"""
    v_mul_lo_u32 v2, v0, {size}
    v_mul_lo_u32 v3, v0, {np.dtype(out).itemsize}
    global_load_{load} v4, v2, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_{store} v3, v4, s[6:7]
    """
    x = np.arange(-32, 32).astype(dtype)
    y = np.zeros(64, out)
    run(body, target, x, y)
    assert (y == x).all()


@both_targets
def test_half_word_loads_and_stores(target: str) -> None:
    body = """
    v_lshlrev_b32_e32 v2, 1, v0
    v_mov_b32_e32 v4, 0x1234abcd
    global_load_short_d16_hi v4, v2, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[6:7]
    global_store_short_d16_hi v2, v4, s[8:9]
    """
    x, y, z = np.arange(64).astype(np.uint16), np.zeros(64, np.uint32), np.zeros(64, np.uint16)
    run(body, target, x, y, z)
    assert (y == (x.astype(np.uint32) << 16 | 0xABCD)).all()
    assert (z == x).all()


@both_targets
def test_address_forms(target: str) -> None:
    """A 64-bit vector address and a scalar base reach the same byte; offsets may be negative."""
    body = """
    v_mov_b32_e32 v3, 0
    v_lshl_add_u64 v[4:5], v[1:2], 0, s[4:5]
    """.replace("v[1:2]", "v[2:3]")
    body = (
        "v_mov_b32_e32 v2, v1\n"
        + body
        + """
    global_load_dword v6, v[4:5], off offset:16
    global_load_dword v7, v1, s[4:5] offset:16
    s_waitcnt vmcnt(0)
    v_sub_u32_e32 v8, v6, v7
    v_add_u32_e32 v9, 32, v1
    global_store_dword v9, v8, s[6:7] offset:-32
    """
    )
    x, y = np.arange(80).astype(np.uint32), np.ones(64, np.uint32)
    run(body, target, x, y)
    assert (y == 0).all()


@both_targets
@pytest.mark.parametrize("access", ["global_load_dword v4, v1, s[4:5]", "global_store_dword v1, v1, s[4:5]"])
def test_access_outside_every_buffer_faults(access: str, target: str) -> None:
    with pytest.raises(MemoryFault, match=access.split()[0]):
        run(access, target, np.zeros(63, np.uint32))


@both_targets
def test_masked_lanes_do_not_access(target: str) -> None:
    body = "v_cmp_gt_u32_e32 vcc, 63, v0\ns_and_saveexec_b64 s[12:13], vcc\nglobal_store_dword v1, v1, s[4:5]"
    x = np.zeros(63, np.uint32)
    run(body, target, x)
    assert (x == 4 * np.arange(63)).all()


BUFFER = "s_mov_b32 s6, s10\ns_mov_b32 s7, 0x27000\n"


@both_targets
def test_buffer_range_check(target: str) -> None:
    """Past num_records a load gives zero and a store does nothing; each word is checked by itself."""
    body = (
        BUFFER
        + """
    buffer_load_dword v4, v1, s[4:7], 0 offen
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[8:9]
    buffer_store_dword v1, v1, s[4:7], 0 offen
    """
    )
    x, z = np.full(64, 7, np.uint32), np.full(64, 9, np.uint32)
    run(body, target, x, np.zeros(1, np.uint32), z, number=160)
    assert z.tolist() == [7] * 40 + [0] * 24
    assert x.tolist() == [4 * i for i in range(40)] + [7] * 24
    big = BUFFER + "v_bfrev_b32_e32 v2, 1\nbuffer_load_dwordx4 v[4:7], v2, s[4:7], 0 offen offset:16"
    run(big, target, x, number=0x7FFFFFFE)  # the offset 2^31 that compilers use for masked lanes


@both_targets
def test_buffer_inside_its_range_but_outside_memory_faults(target: str) -> None:
    with pytest.raises(MemoryFault):
        run(
            BUFFER + "buffer_load_dword v4, v1, s[4:7], 0 offen", target, np.zeros(63, np.uint32), number=4096
        )


@both_targets
def test_lds_round_trips(target: str) -> None:
    body = """
    v_lshlrev_b32_e32 v2, 3, v0
    v_add_u32_e32 v3, 7, v0
    ds_write_b64 v2, v[0:1]
    ds_write2st64_b32 v1, v0, v3 offset0:2 offset1:3
    s_waitcnt lgkmcnt(0)
    ds_read2_b32 v[4:5], v2 offset1:1
    ds_read2st64_b32 v[6:7], v1 offset0:2 offset1:3
    ds_read_u16 v8, v1 offset:512
    s_waitcnt lgkmcnt(0)
    v_add3_u32 v9, v4, v5, v6
    v_add3_u32 v9, v9, v7, v8
    global_store_dword v1, v9, s[4:5]
    """
    x = np.zeros(64, np.uint32)
    report = run(body, target, x, lds=1024)
    lane = np.arange(64)
    assert (x == lane + 4 * lane + lane + (lane + 7) + lane).all()
    assert not report.races


@both_targets
def test_lds_bounds(target: str) -> None:
    with pytest.raises(MemoryFault, match="LDS address 252"):
        run("ds_write_b32 v1, v0", target, lds=252)


@both_targets
def test_lds_partial_writes_and_high_halves(target: str) -> None:
    memory = np.zeros(256, np.uint8)
    text = """
    v_mov_b32_e32 v2, 0xaabbccdd
    ds_write_b8 v1, v2
    ds_write_b8_d16_hi v1, v2 offset:1
    ds_write_b16_d16_hi v1, v2 offset:2
    s_waitcnt lgkmcnt(0)
    ds_read_b32 v3, v1
    s_waitcnt lgkmcnt(0)
    """
    m = execute(text, target, {1: np.arange(64, dtype=np.uint32) * 4}, lds=memory)
    assert (vector(m, 3) == 0xAABBBBDD).all()


@both_targets
@pytest.mark.parametrize("form", ["global", "buffer"])
@pytest.mark.parametrize("words", [1, 4])
def test_direct_to_lds(form: str, words: int, target: str) -> None:
    if words == 4 and target == "gfx942":
        name = "global_load_lds_dwordx4 v[2:3], off"
        if form == "global":
            with pytest.raises(UnsupportedInstruction, match="does not exist on gfx942"):
                execute(name, target)
        return
    size = 4 * words
    suffix = f"dwordx{words}" if words > 1 else "dword"
    load = {
        "global": f"global_load_lds_{suffix} v2, s[4:5]",
        "buffer": BUFFER.replace("s6", "s14").replace("s7", "s15")
        + f"s_mov_b64 s[12:13], s[4:5]\nbuffer_load_{suffix} v2, s[12:15], 0 offen lds",
    }[form]
    body = f"""
    v_mul_lo_u32 v2, v0, {size}
    s_mov_b32 m0, 128
    {load}
    s_waitcnt vmcnt(0)
    ds_read_b32 v4, v2 offset:128
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v4, s[6:7]
    """
    x = np.random.default_rng(2).integers(0, 2**32, 64 * words, dtype=np.uint32)
    y = np.zeros(64, np.uint32)
    report = run(body, target, x, y, lds=128 + 64 * size, number=64 * size)
    assert (y == x[::words]).all()
    assert not report.races


@both_targets
def test_atomics(target: str) -> None:
    body = """
    v_mov_b32_e32 v2, 0
    v_cvt_f32_u32_e32 v3, v0
    global_atomic_add v4, v2, v0, s[4:5] sc0
    global_atomic_smax v2, v0, s[4:5] offset:4
    global_atomic_add_f32 v2, v3, s[4:5] offset:8
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[6:7]
    """
    x, y = np.zeros(3, np.uint32), np.zeros(64, np.uint32)
    run(body, target, x, y)
    assert x[:2].tolist() == [64 * 63 // 2, 63]
    assert x.view(np.float32)[2] == 64 * 63 / 2
    assert (y == np.concatenate(([0], np.cumsum(np.arange(63))))).all()


@both_targets
def test_lds_atomics_between_waves(target: str) -> None:
    body = """
    v_mov_b32_e32 v2, 0
    v_mov_b32_e32 v3, 1
    v_cmp_eq_u32_e32 vcc, 0, v0
    s_and_saveexec_b64 s[12:13], vcc
    ds_write_b32 v2, v2
    s_or_b64 exec, exec, s[12:13]
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_add_u32 v2, v3
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v4, v2
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v4, s[4:5]
    """
    x = np.zeros(256, np.uint32)
    report = run(body, target, x, lds=4, warps=4)
    assert (x == 256).all()
    assert not report.races
    assert run(body.replace("s_barrier", "s_nop 0"), target, x, lds=4, warps=4).races


@both_targets
@pytest.mark.parametrize(
    ("stride", "conflicts"), [(1, 0), (2, {"gfx942": 2, "gfx950": 1}), (32, {"gfx942": 62, "gfx950": 31})]
)
def test_bank_conflicts(stride: int, conflicts: Any, target: str) -> None:
    """Lanes 4 * stride bytes apart: 32 lanes a cycle on gfx942's 32 banks, 64 on gfx950's 64."""
    body = f"v_mul_lo_u32 v2, v0, {4 * stride}\nds_write_b32 v2, v0"
    report = run(body, target, lds=4 * stride * 64)
    assert report.bank_conflicts == (conflicts[target] if conflicts else 0)


# --- errors that name the instruction
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("v_frobnicate_b32 v0, v1", "v_frobnicate_b32"),
        ("v_mov_b32_e32 v0, v1 sparkle:3", "sparkle"),
        ("v_add_f32_dpp v0, v1, v2 row_twist:1 row_mask:0xf bank_mask:0xf", "row_twist"),
        ("s_waitcnt depctr_va_vdst(0)", "depctr"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3", "rounding"),
        ("v_add_u32_e32 v0, v[1:2], v3", r"v\[1:2\]"),
        ("ds_read_b32 v0, v1 gds", "gds"),
        (
            "v_or_b32_sdwa v0, v1, v2 dst_sel:NIBBLE_0 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
            "NIBBLE_0",
        ),
        ("flibber v0", "flibber"),
    ],
)
def test_unknown_is_an_error(text: str, named: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=named):
        execute(text, "gfx942")


def test_launch_checks() -> None:
    x = np.zeros(64, np.uint32)
    code = kernel("", "gfx942")
    with pytest.raises(ValueError, match="C-contiguous"):
        launch(code, (1,), [x[::2], x, x, 0])
    with pytest.raises(ValueError, match="must be a number"):
        launch(code, (1,), [x, x, x, x])
    with pytest.raises(ValueError, match="5 arguments"):
        launch(code, (1,), [x, x, x, 0, 0])
    with pytest.raises(ValueError, match="one to three"):
        launch(code, (1, 1, 1, 1), [x, x, x, 0])
    with pytest.raises(ValueError, match="LDS"):
        launch(kernel("", "gfx942", lds=65537), (1,), [x, x, x, 0])
    with pytest.raises(ExecutionError, match="max_steps"):
        launch(kernel("loop:\ns_branch loop", "gfx942"), (1,), [x, x, x, 0], max_steps=1000)


def test_a_wave_that_ended_does_not_hold_up_the_barrier() -> None:
    body = """
    v_readfirstlane_b32 s11, v0
    s_cmp_eq_u32 s11, 0
    s_cbranch_scc1 out
    s_barrier
    global_store_dword v1, v1, s[4:5]
    out:
    """
    x = np.zeros(128, np.uint32)
    run(body, "gfx942", x, warps=2)
    assert x.tolist() == [0] * 64 + [4 * i for i in range(64, 128)]


def test_hidden_arguments_describe_the_grid() -> None:
    """Kernels read the number of programs from arguments that the runtime adds; a missing one is an error."""
    code = kernel("v_mov_b32_e32 v2, s10\nglobal_store_dword v1, v2, s[4:5]", "gfx942")
    hidden = Argument(24, 4, "hidden_block_count_y")
    code = CompiledKernel(**{**code.__dict__, "arguments": (*code.arguments[:3], hidden)})
    x = np.zeros(64, np.uint32)
    launch(code, (2, 7), [x, x, x])
    assert (x == 7).all()
    with pytest.raises(ValueError, match="offset 24"):
        launch(CompiledKernel(**kernel("", "gfx942").__dict__), (1,), [x, x, x])


def test_views_share_memory_and_read_only_stays() -> None:
    body = "global_load_dword v4, v1, s[4:5]\ns_waitcnt vmcnt(0)\nglobal_store_dword v1, v4, s[6:7]"
    x = np.arange(128, dtype=np.uint32)
    run(body, "gfx942", x[:64], x[64:])
    assert (x[64:] == np.arange(64)).all()
    fixed = np.arange(64, dtype=np.uint32)
    fixed.flags.writeable = False
    y = np.zeros(64, np.uint32)
    run(body, "gfx942", fixed, y)
    assert (y == fixed).all()


def test_a_store_into_a_read_only_array_is_an_error() -> None:
    fixed = np.zeros(64, np.uint32)
    fixed.flags.writeable = False
    with pytest.raises(MemoryFault, match="read-only"):
        run("global_store_dword v1, v1, s[4:5]", "gfx942", fixed)


@both_targets
def test_grid_and_workgroup_numbers(target: str) -> None:
    code = kernel(
        """
    v_mov_b32_e32 v2, s2
    v_lshl_or_b32 v2, s3, 8, v2
    v_lshl_or_b32 v2, s11, 16, v2
    """.replace("s11", "s20")
        + "global_store_dword v1, v2, s[4:5]",
        target,
    )
    text = ".amdhsa_system_sgpr_workgroup_id_y 1\n.amdhsa_system_sgpr_workgroup_id_z 1\n.amdhsa_user_sgpr_count 2\n"
    code = CompiledKernel(**{**code.__dict__, "asm": text + "s_mov_b32 s20, s4\n" + code.asm})
    x = np.zeros(64, np.uint32)
    launch(code, (3, 4, 5), [x, x, x, 0])
    assert x[0] == 2 | 3 << 8 | 4 << 16  # the last workgroup stored last
