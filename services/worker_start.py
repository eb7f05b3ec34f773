"""What both worker roles do before they serve: where the model lies, what it is called, how torch is told to run."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.version import __version__
from services import event_loop, logs
from services.model_fetch import ModelHome
from services.models import ModelNotAvailable, resolve
from services.start_error import ExitCode, StartError
from services.torch_threads import in_passing_thread, wait_briefly
from services.turns import CpuTurn, TakingTurns, default_path
from specdec.messages import Identity, Role
from specdec.vocabulary import InvalidTokenizer, VocabularyDigest

if TYPE_CHECKING:
    from services.settings import DraftSettings, ServingSettings, TargetSettings, WorkerSettings
    from services.worker_process import ServeOptions
    from specdec.engine.model import LanguageModel

log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::", "*", "")
"""Hosts that stand for every address of this machine."""


def prepare(settings: WorkerSettings, role: str) -> None:
    """Logging, and what torch and gRPC read when they are imported. Raises StartError."""
    start_logging(settings, role)
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    if settings.cpu_turns:
        wait_briefly(os.environ)


def start_logging(settings: ServingSettings, role: str) -> None:
    """Raises StartError if log_dir cannot be written."""
    try:
        logs.configure(role, logs.LogConfig.of(settings, getattr(settings, "worker_id", "")))
    except OSError as error:
        raise StartError(f"cannot write to log_dir {settings.log_dir}: {error.strerror}") from error


def model_folder(name: str) -> Path:
    """Folder of a model that must be on disk already. GGUF is converted once, and kept. Raises StartError."""
    try:
        path = resolve(name)
    except ModelNotAvailable as error:
        raise StartError(str(error)) from error
    if path.suffix != ".gguf":
        return path
    from specdec.engine.gguf import ConversionFailed, convert_gguf

    folder = _conversion_of(path)
    if not folder.exists():
        log.info("converting %s, once, into %s", path, folder)
    try:
        convert_gguf(path, folder)
    except ConversionFailed as error:
        raise StartError(str(error)) from error
    return folder


def _conversion_of(path: Path) -> Path:
    """Where the conversion of a GGUF file is kept; another file under the same name gets another folder."""
    facts = path.stat()
    key = hashlib.sha256(f"{path}:{facts.st_size}:{facts.st_mtime_ns}".encode()).hexdigest()[:8]
    return ModelHome.from_environment().root / "converted" / f"{path.stem}-{key}"


def served_name(name: str, folder: Path) -> str:
    """What clients call the model: the name it was asked for by, of a path its last part."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.stem if path.suffix == ".gguf" else folder.name


def load_model(settings: WorkerSettings, folder: Path, patience: float, **choices: Any) -> LanguageModel:
    """The model in `folder`. choices: more for `specdec.engine.loading.load`. Imports torch. Raises StartError."""
    from transformers.utils import logging as transformers_logging

    from specdec.engine.errors import ModelRefused
    from specdec.engine.loading import load

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    def read() -> LanguageModel:
        return load(
            folder,
            dtype=settings.dtype,
            threads=settings.threads,
            kv_memory=settings.kv_memory,
            device=settings.device,
            max_context=settings.max_context,
            **choices,
        )

    try:
        model = in_passing_thread(read) if settings.device == "cpu" else read()
    except (ModelRefused, InvalidTokenizer, ValueError) as error:
        raise StartError(str(error)) from error
    if settings.cpu_turns and settings.device == "cpu":
        return TakingTurns(model, _open_turn(patience))
    return model


def _open_turn(patience: float) -> CpuTurn:
    path = default_path()
    try:
        return CpuTurn(path, patience)
    except OSError as error:
        raise StartError(f"cannot open {path} ({error.strerror}): remove it, or set cpu_turns to false") from error


def model_identity(worker_id: str, role: Role, name: str, model: LanguageModel, digest: VocabularyDigest) -> Identity:
    return Identity(
        worker_id=worker_id,
        role=role,
        model_name=name,
        vocabulary_size=digest.size,
        vocabulary_sha256=digest.sha256,
        vocabulary_run_digests=digest.run_digests,
        context_length=model.context_length,
        version=__version__,
        device=model.device,
        dtype=model.dtype,
        numeric_noise=model.numeric_noise,
        turns=model.turns if isinstance(model, TakingTurns) else "",
    )


def serve_options(settings: TargetSettings | DraftSettings, listen: str) -> ServeOptions:
    """Raises StartError if the address is public and nothing protects it."""
    from services.server import TlsFiles
    from services.telemetry.tracing_start import trace_worker
    from services.worker_process import ServeOptions

    refuse_exposed(listen, settings)
    tls = None
    if settings.tls_cert and settings.tls_key:
        tls = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
    return ServeOptions(
        tls=tls,
        grace=settings.drain_timeout,
        health_address=settings.health_listen,
        ignore_sigint=bool(os.environ.get(logs.LAUNCHED_VARIABLE)),
        tracing=trace_worker(settings),
    )


def refuse_exposed(listen: str, settings: ServingSettings) -> None:
    """Raises StartError if `listen` is beyond loopback without TLS, unless that is allowed."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise StartError("tls_cert and tls_key belong together: give both", ExitCode.WRONG_USE)
    if listen.startswith("unix:") or settings.tls_cert or settings.allow_unauthenticated:
        return
    host = listen.rpartition(":")[0].strip("[]")
    if host != "localhost" and not _is_loopback(host):
        raise StartError(
            f"{listen} can be reached from other machines and nothing protects it: "
            "give --tls-cert and --tls-key, or --allow-unauthenticated",
            ExitCode.WRONG_USE,
        )


def refuse_wildcard(settings: TargetSettings | DraftSettings) -> None:
    """Raises StartError if the lease would tell schedulers an address that means "here" to each of them."""
    advertised = settings.advertise or settings.listen
    host = advertised.rpartition(":")[0].strip("[]")
    if settings.redis_url and not advertised.startswith("unix:") and host in WILDCARDS:
        name = "advertise" if settings.advertise else "listen"
        raise StartError(
            f"{name} is {advertised}, which schedulers on other machines cannot reach: give --advertise HOST:PORT, "
            "the address of this worker as they see it",
            ExitCode.WRONG_USE,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def say_serving(address: str) -> None:
    log.info("serving at %s", address)


def serve(work: Coroutine[Any, Any, None]) -> int:
    """Runs a server to its end. Raises StartError if it cannot listen."""
    with start_errors():
        event_loop.run(work)
    return ExitCode.OK


@contextlib.contextmanager
def start_errors() -> Iterator[None]:
    """What servers raise at their start, as StartError."""
    from services.redis_client import RedisUnavailable
    from services.server import CannotListen, PortInUse
    from services.worker_process import WorkerCrashed

    try:
        yield
    except PortInUse as error:
        raise StartError(f"{error}: choose another address with --listen") from error
    except (CannotListen, RedisUnavailable, WorkerCrashed) as error:
        raise StartError(str(error)) from error
