"""How kernels are launched: compiled once, then called with as little Python as Triton's own launcher allows.

Owns `Launch`, the cheap call path, and `Scratch`, one block of device memory cut into typed parts. Knows no kernel.
Imported by the launchers of this package and by the tests that compile every variant without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

INT = int  # a runtime integer parameter: never specialised on its value, so that one compile serves every token count
ALIGNMENT = 256  # bytes; each part of a scratch block starts at a multiple, well past the 16 that vector loads need

_TRITON_NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A parameter that is a tensor descriptor for the copy engine: element dtype and block shape.

    swizzle: bytes of the swizzle pattern in shared memory, which a Gluon kernel states itself; None: a Triton kernel.
    """

    dtype: torch.dtype
    block: tuple[int, ...]
    swizzle: int | None = None

    @functools.cached_property  # eager calls ask for it, and Gluon checks it at length
    def layout(self) -> Any:
        """The layout in shared memory of a Gluon kernel's blocks."""
        from triton.experimental.gluon.language import NVMMASharedLayout

        return NVMMASharedLayout(swizzle_byte_width=self.swizzle, element_bitwidth=8 * self.dtype.itemsize, rank=len(self.block))

    @property
    def signature(self) -> str:
        """As Triton's compiler writes the type."""
        layout = "" if self.swizzle is None else f",{self.layout!r}"
        return f"tensordesc<{_TRITON_NAMES[self.dtype][1:]}{list(self.block)}{layout}>"

    def of(self, tensor: torch.Tensor) -> Any:
        """The descriptor of a contiguous tensor of as many dimensions as the block."""
        if self.swizzle is not None:
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

            return GluonDescriptor.from_tensor(tensor, list(self.block), self.layout)
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(tensor, list(self.block))


def interpreted(kernel: Any) -> bool:
    """Whether `kernel` runs under Triton's interpreter (TRITON_INTERPRET=1 when it was defined)."""
    return isinstance(kernel, InterpretedFunction)


@dataclasses.dataclass
class Launch:
    """One kernel with everything fixed but pointers and counts.

    params: the runtime parameters in the kernel's order, each a torch dtype (a pointer to it), a Descriptor, None (a
        pointer that is not used) or INT. constants: the kernel's constexpr parameters, all after the runtime ones, in any order.
    max_registers: a cap on registers a thread, which a warp-specialised kernel shares out anew.
    pdl: launched with programmatic dependent launch: the kernel itself waits before it reads what its predecessor wrote.
    Pointers are taken as 16-byte aligned unless the kernel says otherwise; callers see to it.
    """

    kernel: Any
    params: Sequence[torch.dtype | Descriptor | type[int] | None]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    pdl: bool = False
    max_registers: int | None = None

    def __post_init__(self) -> None:
        self._constants = tuple(self.constants[name] for name in self.kernel.arg_names[len(self.params) :])
        self._options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.pdl:
            self._options["launch_pdl"] = True
        if self.max_registers is not None:
            self._options["maxnreg"] = self.max_registers
        self._compiled: dict[int, tuple[Any, Any, Any]] = {}
        self._kept: dict[int, Any] = {}  # a compiled kernel unloads its binary when it goes
        self._interpreted = interpreted(self.kernel)

    def compile(self, device: int) -> Any:
        """Compile for CUDA device `device` (which must be current) and load; the compiled kernel. Nothing is launched."""
        arguments = [_stand_in(param, "cuda") for param in self.params]
        compiled = self.kernel.warmup(*arguments, **self.constants, **self._options, grid=(1,))
        run = compiled.run  # loads the binary: too much shared memory raises OutOfResources here
        self._compiled[device] = (run, compiled.function, compiled.packed_metadata)
        self._kept[device] = compiled
        return compiled

    def compile_for_cache(self) -> Any:
        """Compile for the target of triton's active driver, into triton's cache on disk, by the way that `compile` takes. Loads nothing."""
        arguments = [_stand_in(param, "cpu") for param in self.params]
        return self.kernel.warmup(*arguments, **self.constants, **self._options, grid=(1,))

    def compile_for(self, target: Any) -> Any:
        """Compile for a `GPUTarget` that need not be present; the compiled kernel."""
        names = list(self.kernel.arg_names)
        signature: dict[str, str] = {}
        constants: dict[str, Any] = dict(self.constants)
        attrs: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, (name, param) in enumerate(zip(names, self.params, strict=False)):
            if param is None:
                signature[name], constants[name] = "constexpr", None
            elif param is INT:
                signature[name] = "i32"
            elif isinstance(param, Descriptor):
                signature[name] = param.signature
            else:
                signature[name] = _TRITON_NAMES[param]  # type: ignore[index]
                if not self.kernel.params[index].do_not_specialize_on_alignment:
                    attrs[(index,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(self.constants, "constexpr")
        source_type: Any = triton.compiler.ASTSource
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            source_type = GluonASTSource
        source = source_type(fn=self.kernel, signature=signature, constexprs=constants, attrs=attrs)
        return triton.compile(source, target=target, options=self._options)

    def __call__(self, grid: int, device: int, stream: int, *arguments: Any) -> None:
        """Launch `grid` programs on `stream` of `device` (the current one). Pointers are integers, or tensors if interpreted."""
        if self._interpreted:
            self.kernel[(grid,)](*arguments, **self.constants)
            return
        compiled = self._compiled.get(device)
        if compiled is None:
            self.compile(device)
            compiled = self._compiled[device]
        run, function, metadata = compiled
        run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments, *self._constants)


def _stand_in(param: torch.dtype | Descriptor | type[int] | None, device: str) -> Any:
    """What a kernel is compiled with in place of a runtime argument."""
    if param is INT:
        return 1 << 30
    if isinstance(param, Descriptor):
        return param.of(torch.empty(param.block, dtype=param.dtype, device=device))
    return param


class Scratch:
    """Names the parts of one block of scratch memory: `Scratch(a=(rows, dtype), ...)`. Pure: holds no memory."""

    def __init__(self, **parts: tuple[int, torch.dtype]) -> None:
        self.parts = parts
        self.offsets: dict[str, int] = {}
        end = 0
        for name, (count, dtype) in parts.items():
            self.offsets[name] = end
            end += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.nbytes = end

    def pointers(self, device: torch.device, *, as_tensors: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        """Allocate the block: (the tensor that keeps it alive, the address of each part, or its tensor)."""
        block = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        if as_tensors:
            return block, {name: self.view(block, name) for name in self.parts}
        base = block.data_ptr()
        return block, {name: base + at for name, at in self.offsets.items()}

    def view(self, block: torch.Tensor, name: str) -> torch.Tensor:
        """Part `name` of an allocated block, as a flat tensor."""
        count, dtype = self.parts[name]
        at = self.offsets[name]
        return block[at : at + count * dtype.itemsize].view(dtype)
