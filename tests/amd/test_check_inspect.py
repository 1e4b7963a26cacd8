"""Reading compiled text: blocks, loops, the main loop; and the static model's counts, on texts written by hand."""

from __future__ import annotations

import pytest

from octavo.check import model
from octavo.check.compile import CompiledKernel
from octavo.check.inspect import Block, Instruction, find_loops, read_code

AMD = """\
	.text
kernel:                                 ; @kernel
; %bb.0:
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_cbranch_scc1 .LBB0_5
.LBB0_1:                                ; =>This Loop Header: Depth=1
	global_load_dwordx4 v[0:3], v4, s[2:3]
	v_mfma_f32_16x16x32_fp8_fp8 v[8:11], v[0:1], v[2:3], v[8:11]
.LBB0_2:                                ; =>  This Inner Loop Header: Depth=2
	.loc	1 10 0
	buffer_load_dwordx4 v5, s[4:7], 0 offen lds
	ds_read_b128 v[0:3], v5
	ds_read2_b64 v[4:7], v5 offset1:8
	s_cbranch_execz .LBB0_3
	v_mfma_f32_32x32x16_fp8_bf8 v[8:23], v[0:1], v[2:3], v[8:23]
	v_mfma_f32_32x32x16_fp8_fp8 v[8:23], v[0:1], v[2:3], v[8:23]
.LBB0_3:
	s_cbranch_scc0 .LBB0_2
	s_cbranch_vccnz .LBB0_1
.LBB0_5:
	global_store_short v0, v1, s[2:3]
	s_endpgm
	.LBB0_9:
.Lfunc_end0:
	.size	kernel, .Lfunc_end0-kernel
"""

PTX = """\
.version 8.7
.target sm_90a
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 128
{
	.reg .pred 	%p<4>;
	ld.param.b64 	%rd1, [kernel_param_0];
	@%p1 bra 	$L__BB0_3;
$L__BB0_2:                              // =>This Inner Loop Header: Depth=1
	.loc	1 36 23                         // kernel.py:36:23
	// begin inline asm
	cp.async.cg.shared.global [ %r10 + 0 ], [ %rd20 + 0 ], 0x10, %r11;
	// end inline asm
	wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%r1,%r2}, %rd3, %rd4, %p1, 1, 1;
	@%p2 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];
	{ .reg .b32 a;
	cvt.rn.satfinite.e4m3x2.f32 a, %r1, %r2; }
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
	@%p3 bra 	$L__BB0_2;
$L__BB0_3:                              // %._crit_edge
	st.global.b16 [%rd1], %rs1;
	ret;
}
	.section .debug_str { .b8 0 }
"""


def _kernel(target: str = "gfx942", **resources: int) -> CompiledKernel:
    fields = {"lds_bytes": 0, "num_warps": 4, **resources}
    return CompiledKernel("kernel", target, "", b"", **fields)  # type: ignore[arg-type]


def test_the_main_loop_is_the_one_whose_own_instructions_do_the_work() -> None:
    code = read_code(AMD, "kernel")
    assert len(code.loops) == 2
    assert code.main_label == ".LBB0_2"
    assert [i.mnemonic for i in code.main if i.is_matrix] == [
        "v_mfma_f32_32x32x16_fp8_bf8",
        "v_mfma_f32_32x32x16_fp8_fp8",
    ]
    assert code.histogram["s_cbranch_scc1"] == 1
    assert code.instructions[-1].mnemonic == "s_endpgm"


def test_counts_of_the_main_loop_on_amd() -> None:
    found = model.model(_kernel(vgprs=24), read_code(AMD, "kernel"))
    assert found.matrix_cycles == 64
    assert found.flops == 2 * 2 * 32 * 32 * 16
    # Per lane: a direct-to-LDS load of 16 bytes, which is both, ds_read_b128 and two times 8 of ds_read2_b64.
    assert found.global_bytes == 64 * 16
    assert found.lds_bytes == 64 * (16 + 16 + 16)
    assert found.flops_per_byte == 64


def test_the_main_loop_of_ptx() -> None:
    code = read_code(PTX, "kernel")
    assert (code.main_label, len(code.loops)) == ("$L__BB0_2", 1)
    names = [i.mnemonic for i in code.main]
    assert names == [
        "cp.async.cg.shared.global",
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
        "ld.global.v4.b32",
        "cvt.rn.satfinite.e4m3x2.f32",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "bra",
    ]
    assert code.main[2].guarded
    found = model.model(_kernel("sm_90", vgprs=128), code)
    assert found.global_bytes == 32 * (16 + 16)
    assert found.lds_bytes == 32 * (16 + 16)
    # A warpgroup's product on the SM's four matrix cores at 8192 FLOPs a cycle; a quarter of the FLOPs a warp.
    assert (found.flops, found.matrix_cycles) == (2 * 64 * 128 * 32 // 4, 64)


def test_a_kernel_without_a_loop_is_its_own_main_part() -> None:
    straight = AMD.replace("s_cbranch_scc0 .LBB0_2", "s_nop 0").replace("s_cbranch_vccnz .LBB0_1", "s_nop 0")
    code = read_code(straight, "kernel")
    assert code.main_label is None
    assert code.main == code.instructions


def test_an_unknown_text_is_an_error_and_not_an_empty_kernel() -> None:
    with pytest.raises(ValueError, match="no kernel 'other'"):
        read_code(AMD, "other")
    with pytest.raises(ValueError, match="no kernel 'other'"):
        read_code(PTX, "other")
    with pytest.raises(ValueError, match="holds no instruction"):
        read_code("kernel:\n.Lfunc_end0:\n", "kernel")


def test_loops_with_one_header_are_one_and_jumps_into_the_middle_are_none() -> None:
    two_tails = [
        Block("", [], (1,)),
        Block("", [], (2, 3)),
        Block("", [], (1,)),
        Block("", [], (1, 4)),
        Block(""),
    ]
    assert [(loop.header, set(loop.blocks)) for loop in find_loops(two_tails)] == [(1, {1, 2, 3})]
    entered_twice = [Block("", [], (1, 2)), Block("", [], (2,)), Block("", [], (1,))]
    assert find_loops(entered_twice) == ()
    unreachable = [Block("", [], ()), Block("", [], (1,))]
    assert find_loops(unreachable) == ()


@pytest.mark.parametrize(
    ("mnemonic", "operands", "flops", "cycles"),
    [
        ("v_mfma_f32_32x32x16_fp8_fp8", "", 32768, 32),
        ("v_mfma_f32_16x16x32_bf8_fp8", "", 16384, 16),
        ("v_mfma_f32_32x32x8_bf16", "", 16384, 32),
        ("v_mfma_f32_16x16x16_bf16_1k", "", 8192, 16),
        ("v_mfma_f32_32x32x8f16", "", 16384, 32),
        ("v_mfma_f32_32x32x16_f16", "", 32768, 32),
        ("v_mfma_f32_16x16x4_f32", "", 2048, 32),
        ("v_mfma_f32_32x32x64_f8f6f4", "a[0:15], v[0:7], v[8:15], a[0:15]", 131072, 64),
        ("v_mfma_scale_f32_32x32x64_f8f6f4", "a, b, c, d, v1, v2 op_sel_hi:[0,0,0] cbsz:4 blgp:4", 131072, 32),
        ("v_mfma_scale_f32_32x32x64_f8f6f4", "a, b, c, d, v1, v2 op_sel_hi:[0,0,0] cbsz:4", 131072, 64),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", "a, b, c, d, v1, v2 cbsz:2 blgp:4", 65536, 16),
        ("v_mfma_f64_16x16x4_f64", "", 0, None),
    ],
)  # fmt: skip
def test_cycles_of_matrix_instructions(mnemonic: str, operands: str, flops: int, cycles: int | None) -> None:
    assert model.matrix_cost(Instruction(mnemonic, operands), "gfx950") == (flops, cycles)


def test_published_cycles_give_the_published_peak_rates() -> None:
    """TFLOP/s of MI300X (304 compute units, 2.1 GHz) and MI355X (256, 2.4 GHz) by AMD's data sheets, dense."""

    def peak(name: str, units: int, ghz: float, operands: str = "") -> float:
        flops, cycles = model.matrix_cost(Instruction(name, operands), "gfx950")
        assert cycles
        return flops / cycles * 4 * units * ghz / 1000

    assert peak("v_mfma_f32_32x32x16_fp8_fp8", 304, 2.1) == pytest.approx(2614.9, rel=1e-3)
    assert peak("v_mfma_f32_16x16x16_bf16", 304, 2.1) == pytest.approx(1307.4, rel=1e-3)
    assert peak("v_mfma_f32_32x32x64_f8f6f4", 256, 2.4) == pytest.approx(5033.2, rel=1e-3)
    assert peak("v_mfma_f32_32x32x16_bf16", 256, 2.4) == pytest.approx(2516.6, rel=1e-3)
    assert peak("v_mfma_scale_f32_16x16x128_f8f6f4", 256, 2.4, "cbsz:4 blgp:4") == pytest.approx(
        10066.3, rel=1e-3
    )


def test_an_instruction_that_no_table_lists_makes_the_cycles_unknown() -> None:
    code = read_code(AMD.replace("v_mfma_f32_32x32x16_fp8_bf8", "v_smfmac_f32_32x32x32_fp8_bf8"), "kernel")
    assert model.model(_kernel(vgprs=24), code).matrix_cycles is None
    assert model.unlisted(code.main, "gfx942") == ["v_smfmac_f32_32x32x32_fp8_bf8"]


@pytest.mark.parametrize(
    ("mnemonic", "width"),
    [
        ("global_load_ubyte", 1), ("global_store_byte", 1), ("buffer_load_ubyte_d16", 1), ("buffer_store_short", 2),
        ("global_load_sshort", 2), ("global_load_dword", 4), ("buffer_load_dwordx2", 8), ("global_store_dwordx3", 12),
        ("buffer_store_dwordx4", 16), ("global_atomic_smax", 4), ("global_atomic_umax_x2", 8), ("flat_load_dword", 4),
        ("ld.global.b8", 1), ("ld.global.v2.b16", 4), ("st.global.v4.b32", 16), ("atom.global.gpu.relaxed.max.s32", 4),
        ("v_add_f32", 0), ("s_load_dwordx4", 0), ("ds_read_b128", 0), ("cp.async.wait_group", 0),
    ],
)  # fmt: skip
def test_bytes_of_global_memory_by_width(mnemonic: str, width: int) -> None:
    assert model.global_bytes(Instruction(mnemonic)) == width


@pytest.mark.parametrize(
    ("mnemonic", "width"),
    [
        ("ds_write_b8", 1), ("ds_read_u8", 1), ("ds_write_b16", 2), ("ds_read_u16_d16", 2), ("ds_read_b32", 4),
        ("ds_write_b64", 8), ("ds_read_b64_tr_b8", 8), ("ds_read_b96", 12), ("ds_write_b128", 16),
        ("ds_read2_b32", 8), ("ds_write2st64_b64", 16), ("ds_bpermute_b32", 0), ("ds_swizzle_b32", 0),
        ("ld.shared.v4.b32", 16), ("st.shared.b16", 2), ("global_load_dwordx4", 0), ("v_add_f32", 0),
    ],
)  # fmt: skip
def test_bytes_of_lds_by_width(mnemonic: str, width: int) -> None:
    assert model.lds_bytes(Instruction(mnemonic)) == width


@pytest.mark.parametrize(
    ("target", "resources", "waves"),
    [
        ("gfx942", {"vgprs": 64}, 8),
        ("gfx942", {"vgprs": 72}, 7),
        ("gfx942", {"vgprs": 128}, 4),
        ("gfx942", {"vgprs": 129}, 3),
        ("gfx942", {"vgprs": 125, "agprs": 128}, 2),
        ("gfx942", {"vgprs": 126, "agprs": 130}, 1),
        ("gfx942", {"vgprs": 64, "lds_bytes": 32768}, 2),
        ("gfx950", {"vgprs": 64, "lds_bytes": 32768}, 5),
        ("gfx942", {"vgprs": 64, "lds_bytes": 32768, "num_warps": 8}, 4),
        ("gfx942", {"vgprs": 168, "num_warps": 8}, 2),
        ("gfx942", {"vgprs": 64, "lds_bytes": 65540}, 0),
        ("sm_90", {"vgprs": 32}, 16),
        ("sm_90", {"vgprs": 255}, 2),
        ("sm_90", {"vgprs": 32, "lds_bytes": 100 * 1024}, 2),
    ],
)
def test_occupancy(target: str, resources: dict[str, int], waves: float) -> None:
    assert model.occupancy(_kernel(target, **resources)) == waves
