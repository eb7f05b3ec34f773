"""What threads that compute together need and numba has no words for: counters that they share, and waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT64 = ir.IntType(64)

_instruction: Callable[[Callable[..., Any]], Any] = intrinsic


@_instruction
def fetch_add(_: Any, address: Any, amount: Any) -> Any:
    """Adds to the int64 at the address, and returns what it was; other threads see everything written before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, amount = arguments
        return builder.atomic_rmw("add", builder.inttoptr(address, _INT64.as_pointer()), amount, "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@_instruction
def load_shared(_: Any, address: Any) -> Any:
    """The int64 at the address, as other threads wrote it last."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


@_instruction
def pause(_: Any) -> Any:
    """Tells the core that its thread waits for another."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


yield_core: Any = types.ExternalFunction("sched_yield", types.int32())
"""Lets another thread or process have the core."""
