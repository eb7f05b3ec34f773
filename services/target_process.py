"""`outrider target`: builds a target worker from its settings and serves it."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.settings import TargetSettings
from services.start_error import ExitCode, StartError
from services.tokenizer import load_bundle
from services.turns import TARGET_PATIENCE
from services.worker_start import (
    load_model,
    model_folder,
    model_identity,
    prepare,
    refuse_exposed,
    refuse_wildcard,
    say_serving,
    serve,
    serve_options,
    served_name,
)
from specdec.messages import Role, TokenizerBundle
from specdec.vocabulary import InvalidTokenizer, VocabularyDigest

if TYPE_CHECKING:
    from specdec.engine.model import LanguageModel

log = logging.getLogger(__name__)


def run_target(settings: TargetSettings) -> int:
    """Serves until SIGTERM; returns the exit code. Raises StartError."""
    prepare(settings, "target")
    refuse_exposed(settings.listen, settings)
    refuse_wildcard(settings)
    folder = model_folder(settings.model)
    name = announced_name(settings, folder)
    bundle = read_bundle(folder, name)
    if settings.tensor_parallel > 1 and os.environ.get("RANK", "0") != "0":
        return follow_rank_0(settings, folder)
    start = time.monotonic()
    log.info("loading %s from %s", name, folder)
    model = load_target(settings, folder)
    digest = VocabularyDigest.of(bundle.tokenizer_json)
    bundle = replace(bundle, context_length=model.context_length, vocabulary_size=model.vocabulary_size)
    log.info("loaded %s on %s in %s after %.1f s", name, model.device, model.dtype, time.monotonic() - start)

    from services.masks import mask_factory
    from services.metrics import role_metrics
    from services.telemetry.metrics_process import watch_target, worker_metrics
    from services.worker_lease import make_lease
    from services.worker_process import serve_target
    from target_worker.worker import TargetWorker

    metrics = role_metrics("target")
    worker = TargetWorker(
        settings.target_config(),
        model,
        model_identity(settings.worker_id, Role.TARGET, name, model, digest),
        mask_factory(bundle.tokenizer_json, model.vocabulary_size, bundle.stop_token_ids),
        metrics,
    )
    watch_target(metrics, worker.load)
    with worker_metrics(metrics, settings, "target", settings.worker_id):
        return serve(
            serve_target(
                worker,
                bundle,
                settings.listen,
                on_ready=say_serving,
                lease=make_lease(settings, worker),
                options=serve_options(settings, settings.listen),
            )
        )


def follow_rank_0(settings: TargetSettings, folder: Path) -> int:
    """Computes a part of each of rank 0's forwards, for as long as that lives. Raises StartError."""
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun tells all ranks, but rank 0 drains first
        signal.signal(number, signal.SIG_IGN)
    alone = settings.model_copy(update={"cpu_turns": False})
    model = load_target(alone, folder)

    from specdec.engine.parallel import ParallelRunner

    if isinstance(model, ParallelRunner):
        model.follow()
    return ExitCode.OK


def announced_name(settings: TargetSettings, folder: Path) -> str:
    """Rounded weights are another law, so they have another name: no request moves between the two."""
    name = served_name(settings.model, folder)
    return name if settings.quantization == "none" else f"{name}-{settings.quantization}"


def load_target(settings: TargetSettings, folder: Path) -> LanguageModel:
    """Raises StartError."""
    choices = {"tensor_parallel": settings.tensor_parallel, "quantization": settings.quantization}
    return load_model(settings, folder, TARGET_PATIENCE, **choices)


def read_bundle(folder: Path, name: str) -> TokenizerBundle:
    """Raises StartError."""
    try:
        return load_bundle(folder, name)
    except InvalidTokenizer as error:
        raise StartError(str(error)) from error
