"""What a kernel takes of a GPU's processor, and what its inner loop is made of: read from what the compilers wrote."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any, Self

import triton

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);")
_JUMP = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")
_VECTOR = re.compile(r"\bld\.global\S*\.v(\d)\.b(\d+)")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x([0-9a-f]+)")
_TENSOR_CORES = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma", "mma": "mma.sync"}  # of sm_100, of sm_90, of all


@dataclass(frozen=True, slots=True)
class KernelResources:
    registers: int  # of a thread
    stack_bytes: int  # of a thread: what does not fit into them
    shared_bytes: int  # of a program
    num_warps: int
    tensor_cores: str  # the instruction that multiplies tiles: of `_TENSOR_CORES`, or "" for none
    load_bytes: int  # the most that a thread loads at once
    copy_bytes: int  # the most that a thread copies at once to shared memory while it goes on; 0: nothing
    loop_instructions: int | None  # for a turn of the first loop with tensor cores, or of the longest; None: not read
    loop_spills: int  # among them, those that move registers to the stack or back

    @classmethod
    def of(cls, kernel: Any, *, every_loop: bool = True) -> Self:
        """Of one that Triton has compiled. every_loop: read the loop also where no stack, and so no spill, can be.

        The disassembler takes as long to start as the compiler takes for a small kernel.
        """
        ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
        registers, stack = _search(r"REG:(\d+) STACK:(\d+)", _cuobjdump(cubin, "-res-usage"))
        loop = _inner_loop(_cuobjdump(cubin, "-sass")) if every_loop or stack else None
        return cls(
            registers=registers,
            stack_bytes=stack,
            shared_bytes=kernel.metadata.shared,
            num_warps=kernel.metadata.num_warps,
            tensor_cores=next((name for name, instruction in _TENSOR_CORES.items() if instruction in ptx), ""),
            load_bytes=max((int(count) * int(bits) // 8 for count, bits in _VECTOR.findall(ptx)), default=4),
            copy_bytes=max((int(size, 16) for size in _COPY.findall(ptx)), default=0),
            loop_instructions=None if loop is None else len(loop),
            loop_spills=sum("LDL" in line or "STL" in line for line in loop or []),
        )


def _inner_loop(sass: str) -> list[str]:
    """The instructions of the loop that a long input spends its time in."""
    lines = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(sass)]
    loops = []
    for end, text in lines:
        jump = _JUMP.search(text)
        if jump and int(jump[1], 16) < end:
            loops.append([text for address, text in lines if int(jump[1], 16) <= address <= end])
    multiplying = [loop for loop in loops if any("MMA" in line for line in loop)]
    return multiplying[0] if multiplying else max(loops, key=len, default=[])


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _search(pattern: str, text: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"cuobjdump's report holds nothing like {pattern}: {text[:200]}")
    return tuple(map(int, found.groups()))
