"""Loading a model from a local folder into a `ModelRunner`: dtype, threads, KV memory, frozen RoPE, self-test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.engine import attention as attention_seam
from specdec.engine.compiled.compiling import is_kept
from specdec.engine.compiled.decoder import is_compilable
from specdec.engine.compiled.pairs import runs_tiles
from specdec.engine.errors import ModelRefused
from specdec.engine.frozen_rope import freeze_rope
from specdec.engine.graphs import CudaCapture
from specdec.engine.packing import LOOSE, PADDED
from specdec.engine.parallel import ParallelRunner, is_leader, join_ranks, read_parallel
from specdec.engine.quantization import Rounding, choose_rounding, round_runner
from specdec.engine.runner import PAGE_SIZE_CPU, PAGE_SIZE_CUDA, KvShape, ModelRunner, ranks_of
from specdec.engine.self_test import self_test as run_self_test
from specdec.engine.varlen import REFERENCE, HeadShape, PagedAttention, find_varlen
from specdec.engine.vocabulary_size import real_vocabulary_size

log = logging.getLogger(__name__)

DEFAULT_KV_MEMORY = 2 * 2**30
DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32}


def load(
    folder: Path,
    *,
    dtype: str = "auto",
    threads: int | None = None,
    kv_memory: int | None = None,
    attention: str = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    vocabulary_size: int | None = None,
    drafts: bool = False,
    quantization: str = "none",
    tensor_parallel: int = 1,
    self_test: bool = True,
) -> ModelRunner:
    """A runner for the model in `folder` (safetensors, or one GGUF file; the path of a GGUF file does too).

    kv_memory: bytes of KV (default 2 GiB). max_context: tokens of prompt and answer at most (default: the model's).
    vocabulary_size: real ids (default: what the folder's tokenizer says). drafts: for a drafter, whose rows may depend
    on the rows beside them. quantization: none, int4, int8 or auto (see `choose_rounding`). tensor_parallel:
    ranks that hold it together, each of which must call this; then rank 0 leads and the others have to follow.
    self_test: only tests of other things may switch it off. Raises `ModelRefused`, and ValueError for a device or dtype
    that is not there.
    """
    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    name = folder.stem if folder.suffix == ".gguf" else folder.name
    own_layers = device == "cpu" and tensor_parallel == 1 and attention in ("auto", "compiled")
    torch_dtype = _dtype_of(folder) if dtype == "auto" and own_layers else resolve_dtype(dtype, device)
    model = _read(folder, torch_dtype, device, tensor_parallel)
    rounding = choose_rounding(quantization, model, drafts=drafts, ranks=tensor_parallel)
    runner = build_runner(
        model,
        name=name,
        vocabulary_size=vocabulary_size or real_vocabulary_size(folder),
        kv_memory=kv_memory or DEFAULT_KV_MEMORY,
        implementation=attention,
        max_context=max_context,
        exact=not drafts,
    )
    if runner.is_compiled and not is_kept():
        log.info("%s: compiling kernels, which takes up to a minute once on a machine", name)
    if tensor_parallel == 1 and rounding is Rounding.NONE:
        runner.pack_linears()
    if self_test:
        runner.numeric_noise = _tested(runner)
    if rounding is not Rounding.NONE:  # after the test, which compares with the stock forward
        round_runner(runner, rounding, self_test)
    if isinstance(runner, ParallelRunner) and is_leader():
        runner.lead()
    return runner


def _tested(runner: ModelRunner) -> float:
    """Its numeric noise. Layers of our own that do not pass give way to the model's. Raises `ModelRefused`."""
    if runner.is_compiled:
        try:
            return run_self_test(runner)
        except ModelRefused as refusal:
            log.warning("compiled layers: %s; trying its stock layers, which are slower", refusal)
            runner.use_stock_layers()
    return run_self_test(runner)


def _read(folder: Path, dtype: torch.dtype, device: str, tensor_parallel: int) -> Any:
    """The model on its device, or this rank's part of it."""
    if tensor_parallel == 1:
        return read_model(folder, dtype).to(device).eval()
    join_ranks(tensor_parallel, device)
    return read_parallel(folder, dtype, tensor_parallel).eval()


def check_device(device: str) -> None:
    """Raises ValueError if torch cannot compute there."""
    if not device.startswith("cuda"):
        return
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        build = "" if torch.version.cuda else " and this build of torch is for the CPU"
        raise ValueError(f"device is {device}, but torch finds {count} CUDA devices{build}: use --device cpu")


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """The torch dtype of `bf16`, `fp32` or `auto` (bf16 where the hardware has it, else fp32), by torch's products.
    Raises ValueError."""
    if dtype == "auto":
        return torch.bfloat16 if has_native_bf16(device) else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}, must be auto, bf16 or fp32")
    return DTYPES[dtype]


def _dtype_of(folder: Path) -> torch.dtype:
    """What `auto` is on a CPU where layers may be our own: bf16 if they will be, else as by torch's products."""
    tiled = runs_tiles() and is_compilable(read_outline(folder))
    return torch.bfloat16 if tiled else resolve_dtype("auto", "cpu")


def has_native_bf16(device: str) -> bool:
    """Whether the device multiplies bf16 itself; emulation is slower than fp32."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    features = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    return bool(features & {"avx512_bf16", "amx_bf16", "bf16"})


def read_model(folder: Path, dtype: torch.dtype) -> Any:
    """The Hugging Face model in `folder`, unchanged. Raises `ModelRefused` if there is none that can be read."""
    from transformers import AutoModelForCausalLM, GgufConfig

    source, gguf_file = _find_weights(folder)
    extra = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)} if gguf_file else {}
    with _refusing(folder):
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True, **extra
        )


def read_outline(folder: Path) -> Any:
    """The same without weights: its modules and configuration. Raises `ModelRefused`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source, gguf_file = _find_weights(folder)
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    with _refusing(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True, **extra)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]


def _find_weights(folder: Path) -> tuple[Path, str]:
    """The folder, and the GGUF file if it is one. Raises `ModelRefused`."""
    if folder.suffix == ".gguf":
        gguf_files = [folder]
    else:
        gguf_files = [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.gguf"))
    if len(gguf_files) > 1:
        raise ModelRefused(f"{folder} holds {len(gguf_files)} GGUF files: name the one to load")
    source = gguf_files[0].parent if gguf_files else folder
    if not source.is_dir():
        raise ModelRefused(f"{source} is no folder: give the folder of a model")
    return source, gguf_files[0].name if gguf_files else ""


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """What transformers raises for a model becomes `ModelRefused`."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelRefused(f"{folder} cannot be loaded: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def build_runner(
    model: Any,
    *,
    name: str,
    vocabulary_size: int | None = None,
    kv_memory: int = DEFAULT_KV_MEMORY,
    implementation: str = "auto",
    max_context: int | None = None,
    exact: bool = True,
    graphs: bool = True,
) -> ModelRunner:
    """A runner around a model that is in memory already. implementation: compiled (decoder layers of our own), sdpa or
    reference (over gathered keys), varlen or varlen_reference (over block tables), or auto: compiled or varlen where
    they work, else sdpa. graphs: CUDA graphs where varlen is used. Raises `ModelRefused`, and ValueError for an
    implementation that is not there."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or getattr(config, "num_attention_heads", None) is None:
        raise ModelRefused(
            f"{name} ({type(model).__name__}) states no attention heads or no context length: it is recurrent or of an "
            "unknown kind; use a model with causal attention"
        )
    context_length = min(limit, max_context or limit)
    if freeze_rope(model, context_length):
        log.info("%s: RoPE factors frozen for a context of %d tokens", name, context_length)
    page_size = PAGE_SIZE_CUDA if model.device.type == "cuda" else PAGE_SIZE_CPU
    choice = choose_attention(implementation, model, page_size)
    bytes_per_token = KvShape.of(config, model.dtype, ranks_of(model)).bytes_per_token
    kind = ParallelRunner if ranks_of(model) > 1 else ModelRunner
    return kind(
        model,
        name=name,
        vocabulary_size=min(vocabulary_size or config.vocab_size, config.vocab_size),
        context_length=context_length,
        kv_blocks=_kv_blocks(name, kv_memory, bytes_per_token * page_size, context_length, page_size),
        page_size=page_size,
        implementation=choice.gathered,
        compiled=choice.compiled,
        packing=PADDED if exact else LOOSE,
        paged=choice.paged,
        capture=CudaCapture(model.device)
        if graphs and choice.paged is not None and model.device.type == "cuda"
        else None,
    )


def _kv_blocks(name: str, kv_memory: int, bytes_per_block: int, context_length: int, page_size: int) -> int:
    """Blocks that the memory holds. Raises `ModelRefused` if one sequence of full length does not fit."""
    blocks = kv_memory // bytes_per_block
    needed = -(-context_length // page_size)
    if blocks < needed:
        raise ModelRefused(
            f"{name}: {kv_memory / 2**20:.0f} MiB of KV memory hold {blocks * page_size} tokens, one sequence of "
            f"{context_length} needs {needed * bytes_per_block / 2**20:.0f} MiB: raise kv_memory or lower max_context"
        )
    log.info(
        "%s: %.0f MiB of KV memory hold %.1f sequences of the full context of %d tokens",
        name, kv_memory / 2**20, blocks / needed, context_length,
    )  # fmt: skip
    return blocks


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """compiled: the whole layers are. Else `paged` is the attention of chains over block tables, if there is one, and
    `gathered` that of all else."""

    gathered: str = "sdpa"
    paged: PagedAttention | None = None
    compiled: bool = False


def choose_attention(implementation: str, model: Any, page_size: int) -> AttentionChoice:
    """Raises ValueError for a name that is not known, and for what does not work with this model here."""
    if implementation in attention_seam.IMPLEMENTATIONS:
        return AttentionChoice(implementation)
    if implementation == "varlen_reference":
        return AttentionChoice(paged=REFERENCE)
    if implementation not in ("auto", "compiled", "varlen"):
        known = ", ".join(("auto", "compiled", "varlen", "varlen_reference", *attention_seam.IMPLEMENTATIONS))
        raise ValueError(f"attention is {implementation}, must be one of {known}")
    if implementation != "varlen" and is_compilable(model):
        return AttentionChoice(compiled=True)
    paged = find_paged(model, page_size)
    if implementation == "compiled" or (implementation == "varlen" and paged is None):
        raise ValueError(f"attention is {implementation}, which does not work here on {model.device}: use auto")
    return AttentionChoice(paged=paged)


def find_paged(model: Any, page_size: int) -> PagedAttention | None:
    """Attention over block tables, where it computes all that this model asks for on its device."""
    config = model.config.get_text_config()
    if model.device.type != "cuda" or ranks_of(model) > 1:  # the other ranks are told gathers
        return None
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return None
    kv = KvShape.of(config, model.dtype)
    return find_varlen(
        model.device, HeadShape(config.num_attention_heads, kv.kv_heads, kv.head_dim, kv.dtype), page_size
    )
