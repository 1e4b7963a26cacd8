"""Run a compiled kernel over a grid and report what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Importing these fills the instruction table.
from . import atomics, convert, floating, integer, lds, memory, mfma, packed, scalar  # noqa: F401
from .asm import VCC, Instruction, Program, parse
from .errors import ExecutionError
from .lds import LocalMemory
from .memory import GlobalMemory
from .state import Machine
from .table import Run, build
from .tracking import LGKM, VM, Race, Tracker

TARGETS = ("gfx942", "gfx950")
_LDS_LIMIT = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
_BATCH_WAVES = 128  # waves executed in step: enough to hide Python's cost, small enough to stay in cache


@dataclass
class Report:
    """What a launch did. `races` must be empty for correct code; `instructions` counts executed wave instructions
    by mnemonic; `bank_conflicts` is the number of extra LDS cycles of a simple model (see the README)."""

    races: list[Race] = field(default_factory=list)
    bank_conflicts: int = 0
    instructions: Counter[str] = field(default_factory=Counter)

    def raise_for_races(self) -> None:
        """Raise ExecutionError that lists the races, if there are any."""
        if self.races:
            lines = "\n".join(f"  {r.kind}: {r.instruction}: {r.detail}" for r in self.races)
            raise ExecutionError(f"{len(self.races)} race(s):\n{lines}")


@dataclass(frozen=True)
class Step:
    """One decoded instruction: `keys` are the registers it touches, `in_order` the counter whose pending writes its
    own destination may overwrite (loads of one counter return in order)."""

    ins: Instruction
    run: Run
    keys: frozenset[int]
    destination: frozenset[int]
    in_order: int | None


class Executor(Machine):
    """A machine with a program: decoding, control flow, barriers."""

    def __init__(self, program: Program, steps: Sequence[Step], target: str, waves: int) -> None:
        super().__init__(program, target, waves)
        self.labels = program.labels
        self.steps = steps
        self.tracker = Tracker(waves)
        self.running = np.ones(waves, bool)
        self.waiting = np.zeros(waves, bool)
        self.counts: Counter[str] = Counter()
        self._jumped = False

    # --- control, called by scalar instructions
    def branch(self, label: str, taken: np.ndarray) -> None:
        if label not in self.labels:
            raise ExecutionError(f"branch to unknown label {label}")
        where = self.selected
        self.pc[where] = np.where(taken, self.labels[label], self.pc[where] + 1)
        self._jumped = True

    def end(self) -> None:
        self.running[self.selected] = False
        self._jumped = True
        self._release()

    def barrier(self) -> None:
        where = self.selected
        self.pc[where] += 1
        self.waiting[where] = True
        self._jumped = True
        self._release()

    def _release(self) -> None:
        """Let workgroups whose remaining waves all wait go on."""
        groups = int(self.workgroup.max()) + 1
        alive = np.bincount(self.workgroup[self.running], minlength=groups)
        waiting = np.bincount(self.workgroup[self.running & self.waiting], minlength=groups)
        ready = (alive == waiting) & (waiting > 0)
        waves = np.flatnonzero(ready[self.workgroup] & self.running & self.waiting)
        if len(waves):
            self.waiting[waves] = False
            self.lds.at_barrier(self, waves)

    # --- the loop
    def execute(self, limit: int) -> None:
        """Run every wave to its end. Waves furthest behind go first, so that diverged waves meet again."""
        executed = 0
        while True:
            ready = self.running & ~self.waiting
            if not ready.any():
                break
            pc = int(self.pc[ready].min())
            group = ready & (self.pc == pc)
            self.select(None if group.all() else np.flatnonzero(group))
            others = self.pc[ready & ~group]
            stop = int(others.min()) if len(others) else len(self.steps)
            executed += self._run_from(pc, stop)
            if executed > limit:
                raise ExecutionError(f"more than {limit} steps: an endless loop, or raise max_steps")

    def _run_from(self, pc: int, stop: int) -> int:
        """Execute the selected waves from `pc` until they branch, end, wait or meet other waves at `stop`."""
        steps, tracker, counts = self.steps, self.tracker, self.counts
        started = pc
        self._jumped = False
        where = slice(None) if self.idx is None else self.idx
        while True:
            if pc >= len(steps):
                raise ExecutionError("execution ran past the last instruction (no s_endpgm)")
            step = steps[pc]
            if tracker.pending and not step.keys.isdisjoint(tracker.pending):
                tracker.check(self, step.ins, step.keys - step.destination, None)
                tracker.check(self, step.ins, step.destination, step.in_order)
            self.pc[where] = pc
            step.run(self)
            counts[step.ins.name] += self.count
            if self._jumped:
                return pc - started + 1
            pc += 1
            self.pc[where] = pc
            if pc >= stop:
                return pc - started


def decode(program: Program, target: str) -> list[Step]:
    """Build every instruction of a program for a target; the first unknown one raises UnsupportedInstruction."""
    return [_step(ins, target) for ins in program.instructions]


def _step(ins: Instruction, target: str) -> Step:
    in_order = None
    if ins.name.startswith(("buffer_load", "global_load", "flat_load")):
        in_order = VM
    elif ins.name.startswith("ds_"):
        in_order = LGKM
    keys = {k for o in ins.operands for k in o.keys}
    if "vcc" in ins.name or ins.name == "v_div_fmas_f32":
        keys |= {512 + VCC, 513 + VCC}
    loads = in_order is not None and ("_load" in ins.name or "_read" in ins.name)
    to_lds = (
        "_lds_" in ins.name or "lds" in ins.modifiers
    )  # these have addresses only, no destination register
    destination = frozenset(ins.operands[0].keys) if loads and not to_lds else frozenset()
    sources = {k for o in ins.operands[1:] for k in o.keys}
    run = build(ins, target)
    return Step(ins, run, frozenset(keys), destination - sources, in_order)


def launch(
    code: Any,
    grid: Sequence[int],
    args: Sequence[np.ndarray | int | float],
    *,
    max_steps: int = 10_000_000,
) -> Report:
    """Execute a CompiledKernel for gfx942 or gfx950 over `grid` (1 to 3 sizes); arrays are modified in place.

    `args` follow the kernel's run-time parameters in order: C-contiguous arrays of any dtype (ml_dtypes' too) for
    pointers, numbers for the rest. Arrays that are views of one another share memory, as on a device. Raises
    UnsupportedInstruction, MemoryFault or ExecutionError, each naming the instruction; races are reported, not
    raised (see `Report.raise_for_races`).
    """
    if code.target not in TARGETS:
        raise ValueError(f"the executor runs {', '.join(TARGETS)} code, not {code.target}")
    sizes = (*(int(g) for g in grid), 1, 1)[:3]
    if len(grid) > 3 or min(sizes) < 0:
        raise ValueError(f"grid {tuple(grid)} must have one to three sizes that are not negative")
    program = parse(code.asm)
    lds_bytes = max(code.lds_bytes, program.directives.get("group_segment_fixed_size", 0))
    if lds_bytes > _LDS_LIMIT[code.target]:
        raise ValueError(f"{lds_bytes} bytes of LDS exceed {code.target}'s {_LDS_LIMIT[code.target]}")
    steps = decode(program, code.target)
    _check_arguments(code, args)
    arrays = [a for a in args if isinstance(a, np.ndarray)]
    # LLVM may load past the last argument, up to the segment's alignment of 16: those bytes exist and mean nothing.
    kernarg = np.full(max(-(-code.kernarg_bytes // 16) * 16, 16), 0xDE, np.uint8)
    kernarg[: code.kernarg_bytes] = 0
    space = GlobalMemory(arrays, kernarg)
    _pack_arguments(code, args, sizes, space, kernarg)
    report = Report()
    total = sizes[0] * sizes[1] * sizes[2]
    batch = max(1, _BATCH_WAVES // code.num_warps)
    with np.errstate(all="ignore"):
        for first in range(0, total, batch):
            ids = np.arange(first, min(first + batch, total))
            _run_batch(code, program, steps, ids, sizes, lds_bytes, space, kernarg, report, max_steps)
    space.store_back()
    return report


def _run_batch(
    code: Any,
    program: Program,
    steps: Sequence[Step],
    ids: np.ndarray,
    sizes: Sequence[int],
    lds_bytes: int,
    space: GlobalMemory,
    kernarg: np.ndarray,
    report: Report,
    limit: int,
) -> None:
    waves = len(ids) * code.num_warps
    machine = Executor(program, steps, code.target, waves)
    machine.memory = space
    machine.workgroup = np.repeat(np.arange(len(ids)), code.num_warps)
    machine.lds = LocalMemory(len(ids), lds_bytes, waves, code.target)
    _initial_registers(machine, program, code, ids, sizes, space.address(kernarg))
    machine.execute(limit)
    known = set(report.races)
    report.races += [r for r in machine.tracker.races.values() if r not in known]
    report.bank_conflicts += machine.lds.conflicts
    report.instructions.update(machine.counts)


def _initial_registers(
    m: Machine, program: Program, code: Any, ids: np.ndarray, sizes: Sequence[int], kernarg: int
) -> None:
    """Initial SGPRs and v0 as the kernel descriptor asks (LLVM AMDGPU usage, "Initial Kernel Execution State").

    Preloaded arguments are not written: the code then starts at its compatibility entry, which loads them itself.
    """
    d = program.directives
    if d.get("private_segment_fixed_size") or d.get("uses_dynamic_stack"):
        raise ExecutionError("the kernel uses scratch memory, which is not modelled (register spills?)")
    # The dispatch and queue pointers come first; they stay poisoned, so that a kernel that follows one faults.
    reg = 2 * d.get("user_sgpr_dispatch_ptr", 0) + 2 * d.get("user_sgpr_queue_ptr", 0)
    if d.get("user_sgpr_kernarg_segment_ptr", 1):
        m.ws64(reg, np.full(m.waves, kernarg, np.uint64))
    reg = d.get("user_sgpr_count", 2)
    block = ids[m.workgroup]
    for axis, name in enumerate("xyz"):
        if d.get(f"system_sgpr_workgroup_id_{name}", 1 if name == "x" else 0):
            stride = int(np.prod(sizes[:axis]))
            m.ws(reg, (block // stride % sizes[axis]).astype(np.uint32))
            reg += 1
    wave = np.arange(m.waves) % code.num_warps
    # v0 packs the three work-item numbers, ten bits each; Triton's workgroups are one-dimensional.
    m.wv(0, (wave[:, None] * 64 + np.arange(64)).astype(np.uint32))


def _check_arguments(code: Any, args: Sequence[Any]) -> None:
    if len(args) > len(code.arguments):
        raise ValueError(f"{len(args)} arguments for a kernel with {len(code.arguments)}")
    for value, slot in zip(args, code.arguments, strict=False):
        is_array = isinstance(value, np.ndarray)
        if slot.kind == "global_buffer" and not (is_array and value.flags.c_contiguous):
            raise ValueError(
                f"argument at offset {slot.offset} must be a C-contiguous array, not {type(value)}"
            )
        if slot.kind != "global_buffer" and is_array:
            raise ValueError(f"argument at offset {slot.offset} must be a number, not an array")


def _pack_arguments(
    code: Any, args: Sequence[Any], sizes: Sequence[int], space: GlobalMemory, kernarg: np.ndarray
) -> None:
    """Fill the argument segment: the caller's arguments, then what the runtime provides ("hidden" in LLVM's guide).

    Pointers after the caller's (Triton's scratch buffers) are null, so that a kernel that uses them faults.
    """
    hidden = _hidden_arguments(code, sizes)
    for i, slot in enumerate(code.arguments):
        if i < len(args):
            data = _argument_bytes(args[i], slot.size, space)
        elif slot.kind == "global_buffer":
            continue
        elif slot.kind in hidden:
            data = hidden[slot.kind].to_bytes(slot.size, "little")
        elif slot.kind.startswith("hidden_"):
            data = b"\xde" * slot.size  # queues, heaps, printf: a kernel that follows such a pointer faults
        else:
            raise ValueError(f"no value for the argument at offset {slot.offset} ({slot.kind})")
        kernarg[slot.offset : slot.offset + slot.size] = np.frombuffer(data, np.uint8)
    space.copy_in(kernarg)


def _argument_bytes(value: Any, size: int, space: GlobalMemory) -> bytes:
    if isinstance(value, np.ndarray):
        return np.uint64(space.address(value)).tobytes()
    if isinstance(value, (float, np.floating)):
        return np.array(value, {2: np.float16, 4: np.float32, 8: np.float64}[size]).tobytes()
    return int(value).to_bytes(size, "little", signed=int(value) < 0)


def _hidden_arguments(code: Any, sizes: Sequence[int]) -> dict[str, int]:
    """Values of the hidden arguments about the grid, by value_kind (LLVM AMDGPU usage, code object V5)."""
    group = (64 * code.num_warps, 1, 1)
    values = {"hidden_grid_dims": sum(s > 1 for s in sizes) or 1, "hidden_dynamic_lds_size": code.lds_bytes}
    for axis, name in enumerate("xyz"):
        values[f"hidden_block_count_{name}"] = sizes[axis]
        values[f"hidden_group_size_{name}"] = group[axis]
        values[f"hidden_remainder_{name}"] = 0
        values[f"hidden_global_offset_{name}"] = 0
    return values


def run_instructions(text: str, target: str, *, lds_bytes: int = 0, setup: Any = None) -> Executor:
    """Execute a few lines of assembly on one wave and return the machine with its registers.

    For tests of single instructions: `setup(machine)` fills registers before the start; s_endpgm is added.
    """
    program = parse(text + "\ns_endpgm\n")
    program = Program(program.instructions, program.labels, program.directives, 256, 256)
    machine = Executor(program, decode(program, target), target, 1)
    machine.memory = GlobalMemory([], np.zeros(8, np.uint8))
    machine.lds = LocalMemory(1, lds_bytes, 1, target)
    if setup is not None:
        setup(machine)
    with np.errstate(all="ignore"):
        machine.execute(1_000_000)
    machine.select(None)
    return machine
