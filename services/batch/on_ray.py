"""A batch over Ray Data: the input in shards, each a batch of its own with a part of the output, on any machine.

Input and output lie where every machine sees them. A shard that was interrupted goes on where it ended, whichever
machine gets it then; Ray itself tries a shard again whose machine is lost.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray.data

from services.batch.batch import Batch, BatchConfig, Tally, View
from services.batch.input_file import InputFile
from services.pools.ray_cluster import RayCluster
from services.start_error import ExitCode, StartError


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes of the input."""

    number: int
    begin: int
    end: int


class _Silent:
    def show(self, tally: Tally) -> None:
        """Nobody watches a shard."""


def run_on_ray(config: BatchConfig, shard_bytes: int, address: str | None, view: View) -> Tally:
    """config.output is a folder here, which gets part-00000.jsonl and so on. address: of a Ray cluster; None starts Ray
    on this machine. Raises StartError; what was answered until then is kept."""
    if config.output.exists() and not config.output.is_dir():
        raise StartError(f"{config.output} is no folder, which --ray writes into", ExitCode.WRONG_USE)
    config = replace(config, input=config.input.absolute(), output=config.output.absolute())
    tally = Tally(total=len(InputFile(config.input).check()))
    config.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ot", dir="/tmp") as folder:
        cluster = RayCluster(address, Path(folder))
        asyncio.run(cluster.connect())
        try:
            _answer_all(config, shard_bytes, tally, view)
        finally:
            asyncio.run(cluster.close())
    return tally


def _answer_all(config: BatchConfig, shard_bytes: int, tally: Tally, view: View) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = [asdict(shard) for shard in shards(config.input, shard_bytes)]
    answered = ray.data.from_items(rows, override_num_blocks=len(rows)).map(partial(_answer, config=config))
    problem = ""
    for row in answered.iter_rows():
        tally.answered += row["answered"]
        tally.failed += row["failed"]
        tally.tokens += row["tokens"]
        problem = problem or row["problem"]
        view.show(tally)
    if problem:
        raise StartError(problem)


def shards(path: Path, size: int) -> Iterator[Shard]:
    """Of about `size` bytes, each of whole lines: the same whenever the file and the size are."""
    total, begin, number = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while begin < total:
            file.seek(min(begin + size, total) - 1)
            file.readline()
            yield Shard(number, begin, file.tell())
            begin, number = file.tell(), number + 1


def part(config: BatchConfig, shard: Shard) -> BatchConfig:
    """What one shard is answered as."""
    output = config.output / f"part-{shard.number:05}.jsonl"
    return replace(config, output=output, errors=output.with_suffix(".errors.jsonl"), begin=shard.begin, end=shard.end)


def _answer(row: dict[str, Any], config: BatchConfig) -> dict[str, Any]:
    """On a machine of the cluster. What went wrong travels as text: the other shards go on."""
    batch = Batch(part(config, Shard(row["number"], row["begin"], row["end"])), _Silent())
    problem = ""
    try:
        asyncio.run(batch.run())
    except StartError as error:
        problem = str(error)
    tally = batch.tally
    return {"answered": tally.answered, "failed": tally.failed, "tokens": tally.tokens, "problem": problem}
