"""A target larger than one GPU: every rank holds a part of each layer and of its KV, and all of them run the same rows.

Rank 0 is the worker. It alone knows sequences, blocks and logs; before each forward and each move of KV it broadcasts
what is to be computed, and the other ranks follow. Inside the forward the parts meet in transformers' own collectives.
The ranks find each other as torchrun says it: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specdec.engine import attention
from specdec.engine.errors import ModelRefused
from specdec.engine.parallel_batch import decode_batch, encode_batch
from specdec.engine.runner import ModelRunner

log = logging.getLogger(__name__)

FORWARD_TIME = timedelta(minutes=10)
"""A collective inside a forward that takes longer has lost a rank."""
IDLE_TIME = timedelta(days=365)
"""How long the other ranks wait for the next batch: a target may rest."""


class _Command(IntEnum):
    FORWARD = 0
    MOVE = 1


def join_ranks(count: int, device: str) -> str:
    """Meets the other ranks; returns the device of this one. Raises ValueError if there are not `count` of them."""
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != count:
        raise ValueError(f"tensor_parallel is {count}, but torchrun started {found} ranks")
    if device == "cpu" and torch.cuda.is_available():
        raise ValueError("tensor_parallel on cpu needs CUDA_VISIBLE_DEVICES= (empty): transformers would take the GPUs")
    if device != "cpu":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=FORWARD_TIME)
    return device


def is_leader() -> bool:
    """Whether this process is rank 0, or there are no ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def check_heads(config: Any, name: str, count: int) -> None:
    """Raises `ModelRefused` unless every rank gets equally many whole heads."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if not heads or heads % count or kv_heads % count:
        raise ModelRefused(
            f"{name} has {heads} attention heads and {kv_heads} KV heads: tensor_parallel must divide both"
        )


def read_parallel(folder: Path, dtype: torch.dtype, count: int) -> Any:
    """This rank's part of the model in `folder` (safetensors). Raises `ModelRefused`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        check_heads(config, folder.name, count)
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            distributed_config=DistributedConfig(tp_size=count),
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelRefused(f"{folder} cannot be loaded on {count} ranks: {str(error).strip() or error!r}") from error


class ParallelRunner(ModelRunner):
    """A `ModelRunner` over one rank's part. Until `lead` or `follow`, all ranks must make the same calls."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._group = dist.new_group(backend="gloo", timeout=IDLE_TIME)
        self._leads = False

    def lead(self) -> None:
        """From now on the other ranks do what is called here."""
        self._leads = True

    def follow(self) -> None:
        """Does what rank 0 does, until that ends or is lost."""
        while True:
            try:
                command, numbers = self._receive()
            except RuntimeError:  # the connection to rank 0 has broken
                return
            try:
                self._obey(command, numbers)
            except Exception:  # rank 0 meets it too, and knows whose rows they were
                log.exception("a forward failed")

    def _obey(self, command: _Command, numbers: torch.Tensor) -> None:
        if command is _Command.MOVE:
            source, target = numbers.view(2, -1)
            self._move(source, target)
        else:
            layout, wanted = decode_batch(numbers, self._device)
            self._run(attention.PagedForward(layout, self._kv, self.attend), wanted)

    def _run(self, forward: attention.PagedForward, wanted: list[int]) -> torch.Tensor:
        if self._leads:
            self._send(_Command.FORWARD, encode_batch(forward.layout, wanted))
        return super()._run(forward, wanted)

    def _move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._leads:
            self._send(_Command.MOVE, torch.cat((source, target)))
        super()._move(source, target)

    def _send(self, command: _Command, numbers: torch.Tensor) -> None:
        """numbers: int64, [any], on the CPU."""
        dist.broadcast(torch.tensor([command, len(numbers)]), 0, self._group)
        dist.broadcast(numbers, 0, self._group)

    def _receive(self) -> tuple[_Command, torch.Tensor]:
        header = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(header, 0, self._group)
        numbers = torch.zeros(int(header[1]), dtype=torch.int64)
        dist.broadcast(numbers, 0, self._group)
        return _Command(int(header[0])), numbers


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a weight of which this rank may hold a part only; every rank must ask."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
