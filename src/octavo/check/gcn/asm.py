"""Read LLVM's amdgcn assembly text into instructions with typed operands.

The text is what Triton returns beside the code object, so no disassembler is needed and labels resolve branches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import UnsupportedInstruction

AGPR = 256  # accumulation registers follow the 256 architected ones in register numbers
VCC, M0, EXEC = 106, 124, 126  # scalar register numbers, as in the ISA documents
_SCALAR_NAMES = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
}
_PREFIXES = ("v_", "s_", "ds_", "buffer_", "global_", "flat_", "scratch_")
_SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp)$")
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])$")


@dataclass(frozen=True)
class Operand:
    """`kind` is `v` (vector; `reg` from 256 on is an AGPR), `s` (scalar), `int`, `float` or `word` (anything else)."""

    kind: str
    reg: int = 0
    count: int = 1
    value: int | float = 0
    text: str = ""
    neg: bool = False
    abs: bool = False
    sext: bool = False

    @property
    def keys(self) -> tuple[int, ...]:
        """Register numbers for dependency tracking: vector registers as they are, scalar ones from 512 on."""
        if self.kind == "v":
            return tuple(range(self.reg, self.reg + self.count))
        if self.kind == "s":
            return tuple(range(512 + self.reg, 512 + self.reg + self.count))
        return ()


@dataclass
class Instruction:
    """One line: `name` without the encoding suffix, `encoding` one of "", e32, e64, sdwa, dpp."""

    text: str
    line: int
    name: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str] = field(default_factory=dict)

    def where(self) -> str:
        return f"line {self.line}: {self.text}"

    def unsupported(self, why: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(f"{self.where()}: {why}")

    def take(self, name: str, default: str | None = None) -> str | None:
        """Remove a modifier and return its text: what nobody takes is an error at the end of decoding."""
        return self.modifiers.pop(name, default)

    def take_flag(self, name: str) -> bool:
        return self.modifiers.pop(name, None) is not None

    def take_int(self, name: str, default: int = 0) -> int:
        text = self.modifiers.pop(name, None)
        return default if text is None else int(text, 0)

    def take_list(self, name: str, length: int, default: int) -> tuple[int, ...]:
        text = self.modifiers.pop(name, None)
        if text is None:
            return (default,) * length
        values = tuple(int(x) for x in text.strip("[]").split(","))
        return values + (default,) * (length - len(values))


@dataclass(frozen=True)
class Program:
    """Instructions in order, `labels` to instruction index, and the kernel descriptor's directives."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    directives: dict[str, int]
    vgprs: int
    agprs: int


def parse(text: str) -> Program:
    """Parse amdgcn assembly. Lines that are neither labels, instructions nor `.amdhsa_` directives are skipped
    only when they are comments or assembler directives; anything else raises UnsupportedInstruction."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    directives: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split(";")[0].strip()
        if line.startswith(".amdgpu_metadata"):
            break
        if not line or line.startswith("//"):
            continue
        if match := re.match(r"([.\w$]+):$", line):
            labels[match[1]] = len(instructions)
        elif line.startswith("."):
            if match := re.match(r"\.amdhsa_(\w+)\s+(-?\d+)$", line):
                directives[match[1]] = int(match[2])
        else:
            instructions.append(parse_instruction(line, number))
    highest = {"v": 0, "a": 0}
    for instruction in instructions:
        for o in instruction.operands:
            if o.kind == "v":
                bank, base = ("a", AGPR) if o.reg >= AGPR else ("v", 0)
                highest[bank] = max(highest[bank], o.reg - base + o.count)
    return Program(tuple(instructions), labels, directives, max(highest["v"], 1), highest["a"])


def parse_instruction(line: str, number: int = 0) -> Instruction:
    """Parse one instruction line (no comment, no label)."""
    mnemonic, _, rest = line.partition(" ")
    if "\t" in mnemonic:
        mnemonic, _, rest = line.partition("\t")
    if not mnemonic.startswith(_PREFIXES):
        raise UnsupportedInstruction(f"line {number}: {line}: not an instruction this executor knows")
    suffix = _SUFFIX.search(mnemonic)
    name = mnemonic[: suffix.start()] if suffix else mnemonic
    instruction = Instruction(line, number, name, suffix[1] if suffix else "", ())
    operands: list[Operand] = []
    for piece in _split(rest):
        words = _words(piece)
        if not words:
            continue
        operands.append(_operand(words[0]))
        for word in words[1:]:
            key, colon, value = word.partition(":")
            if "(" in key:  # vmcnt(0) lgkmcnt(0)
                operands.append(_operand(word))
            else:
                instruction.modifiers[key] = value if colon else "1"
    instruction.operands = tuple(operands)
    return instruction


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    return re.split(r",(?![^\[(]*[\])])", text) if text.strip() else []


def _words(text: str) -> list[str]:
    return [w for w in re.findall(r"[^\s\[(]*(?:\[[^\]]*\]|\([^)]*\))?\S*", text.strip()) if w]


def _operand(text: str) -> Operand:
    flags = {"neg": False, "abs": False, "sext": False}
    text = text.strip()
    while True:
        if match := re.match(r"(neg|abs|sext)\((.*)\)$", text):
            flags[match[1]], text = True, match[2]
        elif text.startswith("-|") or (text.startswith("-") and text[1:2] in "vsa" and len(text) > 2):
            flags["neg"], text = True, text[1:]
        elif text.startswith("|") and text.endswith("|"):
            flags["abs"], text = True, text[1:-1]
        else:
            break
    if match := _REGISTER.match(text):
        low = int(match[2] or match[3])
        high = int(match[4]) if match[4] else low
        base = AGPR if match[1] == "a" else 0
        return Operand("s" if match[1] == "s" else "v", low + base, high - low + 1, text=text, **flags)
    if text in _SCALAR_NAMES:
        reg, count = _SCALAR_NAMES[text]
        return Operand("s", reg, count, text=text, **flags)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        return Operand("int", value=int(text, 0), text=text, **flags)
    if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", text):
        return Operand("float", value=float(text), text=text, **flags)
    return Operand("word", text=text, **flags)
