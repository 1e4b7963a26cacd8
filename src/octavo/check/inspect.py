"""Read compiled text: instructions, control flow, loops, and the loop that does the work.

Works on LLVM's amdgcn text and on PTX. Both become basic blocks of `Instruction`; a loop is a natural loop of the
control-flow graph (Aho, Lam, Sethi, Ullman, "Compilers", 9.6: a back edge goes to a block that dominates its
source). The main loop is the one whose own instructions, those of loops inside it left out, hold the most matrix
instructions, then move the most global memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MATRIX = re.compile(r"v_mfma_|v_smfmac_|wgmma\.mma_async|mma\.sync|mma\.sp")
GLOBAL_MEMORY = re.compile(
    r"(?:global|buffer|flat)_(?:load|store|atomic)|(?:ld|st|atom|red)\S*\.global|cp\.async(?!\.(?:wait|commit))"
)

_AMD_LABEL = re.compile(r"^([.\w$]+):")
_AMD_BRANCH = re.compile(r"s_c?branch\w*$")
_PTX_LABEL = re.compile(r"^(\$?\w+):\s*")
_PTX_GUARD = re.compile(r"^@!?%?\w+\s+")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `mnemonic`, its `operands` as written, and whether a predicate guards it (PTX)."""

    mnemonic: str
    operands: str = ""
    guarded: bool = False

    @property
    def text(self) -> str:
        return f"{self.mnemonic} {self.operands}".strip()

    @property
    def is_matrix(self) -> bool:
        return MATRIX.match(self.mnemonic) is not None

    @property
    def is_global_memory(self) -> bool:
        return GLOBAL_MEMORY.match(self.mnemonic) is not None


@dataclass
class Block:
    """A basic block: its label ("" for a fall-through), instructions, and the indices of its successors."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)
    successors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A natural loop: indices of its header and of all its blocks."""

    header: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class Code:
    """A kernel's code: `instructions` in order, its loops, and `main`, the instructions of one pass of the main loop.

    `main_label` names the main loop's header, or is None if the kernel has no loop that computes or moves memory;
    `main` is then the whole kernel. Both sides of a branch inside the loop count.
    """

    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]
    main: tuple[Instruction, ...]
    main_label: str | None

    @property
    def histogram(self) -> Counter[str]:
        return Counter(i.mnemonic for i in self.instructions)


def read_code(asm: str, name: str) -> Code:
    """The code of kernel `name` in amdgcn text or PTX.

    Raises:
        ValueError: if the text holds no such kernel or the kernel no instruction.
    """
    blocks = (
        _ptx_blocks(asm, name) if re.search(r"^\.version\s", asm, re.MULTILINE) else _amd_blocks(asm, name)
    )
    instructions = tuple(i for b in blocks for i in b.instructions)
    if not instructions:
        raise ValueError(f"the text of kernel {name!r} holds no instruction: unknown text format")
    loops = find_loops(blocks)
    label, main = _main_loop(blocks, loops)
    return Code(instructions, loops, tuple(instructions if main is None else main), label)


# ---- text to blocks ---------------------------------------------------------------------------------------


def _amd_blocks(asm: str, name: str) -> list[Block]:
    body = re.search(rf"^\"?{re.escape(name)}\"?:(.*?)^\.Lfunc_end", asm, re.MULTILINE | re.DOTALL)
    if body is None:
        raise ValueError(f"the amdgcn text has no kernel {name!r}")
    blocks, jumps = [Block("")], []
    for line in body[1].splitlines():
        label = _AMD_LABEL.match(line)
        if label:
            blocks.append(Block(label[1]))
            jumps.append(("", True))
            continue
        text = line.split(";", 1)[0].strip()
        if not text or text.startswith((".", "//")):
            continue
        mnemonic, *words = text.split()
        operands = " ".join(words)
        blocks[-1].instructions.append(Instruction(mnemonic, operands))
        branch = _AMD_BRANCH.match(mnemonic) is not None
        if branch or mnemonic in ("s_endpgm", "s_setpc_b64"):
            jumps.append((operands if branch else "", mnemonic.startswith("s_cbranch")))
            blocks.append(Block(""))
    return _connect(blocks, jumps)


def _ptx_blocks(asm: str, name: str) -> list[Block]:
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(.*?^\{{", asm, re.MULTILINE | re.DOTALL)
    if entry is None:
        raise ValueError(f"the PTX text has no kernel {name!r}")
    # Directives such as .loc end without a semicolon, so they go by the line.
    text = re.sub(r"//[^\n]*|^\s*\.[^\n]*", "", _braced(asm, entry.end()), flags=re.MULTILINE)
    blocks, jumps = [Block("")], []
    for piece in re.split(r";|\n(?=\$?\w+:)", text):
        statement = piece.strip().lstrip("{} \t\n")
        label = _PTX_LABEL.match(statement)
        if label:
            blocks.append(Block(label[1]))
            jumps.append(("", True))
            statement = statement[label.end() :].strip()
        guard = _PTX_GUARD.match(statement)
        statement = statement[guard.end() :] if guard else statement
        if not statement or statement.startswith((".", "}")):
            continue
        mnemonic, *operands = statement.split()
        instruction = Instruction(mnemonic, " ".join(operands), guard is not None)
        blocks[-1].instructions.append(instruction)
        if mnemonic.split(".")[0] in ("bra", "ret", "exit"):
            jumps.append((instruction.operands if mnemonic.startswith("bra") else "", guard is not None))
            blocks.append(Block(""))
    return _connect(blocks, jumps)


def _braced(text: str, start: int) -> str:
    """What follows `start`, just behind an opening brace, up to its closing one."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    raise ValueError("the PTX text ends inside a kernel")


def _connect(blocks: list[Block], jumps: Sequence[tuple[str, bool]]) -> list[Block]:
    """Set successors: `jumps[i]` is how block i ends, a label to jump to (or "") and whether it may fall through."""
    places = {b.label: i for i, b in enumerate(blocks) if b.label}
    for i, (target, falls) in enumerate(jumps):
        after = [i + 1] if falls else []
        if target in places:
            after.append(places[target])
        blocks[i].successors = tuple(after)
    return blocks


# ---- loops ------------------------------------------------------------------------------------------------


def find_loops(blocks: Sequence[Block]) -> tuple[Loop, ...]:
    """Natural loops, those with the same header merged, of the blocks that are reachable from the first."""
    before: list[list[int]] = [[] for _ in blocks]
    for i, block in enumerate(blocks):
        for j in block.successors:
            before[j].append(i)
    dominators = _dominators(blocks, before)
    bodies: dict[int, set[int]] = {}
    for tail in dominators:
        for head in blocks[tail].successors:
            if head in dominators[tail]:
                bodies.setdefault(head, {head}).update(_body(head, tail, before, dominators))
    return tuple(Loop(head, frozenset(body)) for head, body in sorted(bodies.items()))


def _dominators(blocks: Sequence[Block], before: Sequence[Iterable[int]]) -> dict[int, set[int]]:
    order: list[int] = []
    waiting, seen = [0], {0}
    while waiting:
        here = waiting.pop()
        order.append(here)
        for j in blocks[here].successors:
            if j not in seen:
                seen.add(j)
                waiting.append(j)
    dominators = {i: set(seen) for i in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for i in order[1:]:
            found = set.intersection(*(dominators[j] for j in before[i] if j in seen)) | {i}
            if found != dominators[i]:
                dominators[i] = found
                changed = True
    return dominators


def _body(head: int, tail: int, before: Sequence[Iterable[int]], reachable: Iterable[int]) -> set[int]:
    body, waiting = {head, tail}, [tail] if tail != head else []
    while waiting:
        for j in before[waiting.pop()]:
            if j not in body and j in reachable:
                body.add(j)
                waiting.append(j)
    return body


def _main_loop(blocks: Sequence[Block], loops: Sequence[Loop]) -> tuple[str | None, list[Instruction] | None]:
    best: tuple[tuple[int, int, int], Loop, list[Instruction]] | None = None
    for loop in loops:
        inner = {i for other in loops if other.blocks < loop.blocks for i in other.blocks}
        own = [n for i in sorted(loop.blocks - inner) for n in blocks[i].instructions]
        rank = (sum(n.is_matrix for n in own), sum(n.is_global_memory for n in own), len(own))
        if rank[:2] != (0, 0) and (best is None or rank > best[0]):
            best = (rank, loop, own)
    if best is None:
        return None, None
    return blocks[best[1].header].label or f"block {best[1].header}", best[2]
