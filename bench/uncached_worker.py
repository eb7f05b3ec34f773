"""A worker of `outrider up` without its prefix cache: `python -m bench.uncached_worker target --config FILE`.

Several contestants of a benchmark ask one deployment the same question; the second must not find the first one's
prefill.
"""

from __future__ import annotations

from services.cli.main import main
from specdec.engine.block_pool import BlockPool
from specdec.log import Log


def find_nothing(self: BlockPool, log: Log, max_blocks: int) -> list[int]:
    """In place of `BlockPool.acquire_prefix`."""
    return []


if __name__ == "__main__":
    BlockPool.acquire_prefix = find_nothing  # type: ignore[method-assign]
    main()
