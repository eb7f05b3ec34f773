"""A stand-in for a device: refuses what would wait for one, so that waits are found without one."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, a number read back and a shape that depends on data raise RuntimeError; `tolist` does not, which
    passes no dispatcher."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name.startswith(self.WAITS):
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))
