"""`outrider draft`: builds a draft worker from its settings and serves it. The ngram drafter loads no torch."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from outrider.version import __version__
from services.settings import DraftSettings
from services.start_error import ExitCode, StartError
from services.tokenizer import load_bundle
from services.turns import DRAFT_PATIENCE
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
from specdec.drafter import Drafter
from specdec.grammar import MaskFactory
from specdec.messages import Identity, Role
from specdec.vocabulary import InvalidTokenizer, VocabularyDigest

log = logging.getLogger(__name__)


def run_draft(settings: DraftSettings) -> int:
    """Serves until SIGTERM; returns the exit code. Raises StartError."""
    prepare(settings, "draft")
    refuse_exposed(settings.listen, settings)
    refuse_wildcard(settings)
    built = build_model(settings) if settings.drafter == "model" else build_ngram(settings)

    from draft_worker.worker import DraftWorker
    from services.metrics import role_metrics
    from services.telemetry.metrics_process import watch_draft, worker_metrics
    from services.worker_lease import make_lease
    from services.worker_process import serve_draft

    metrics = role_metrics("draft")
    worker = DraftWorker(settings.draft_config(), built.drafter, built.identity, built.make_mask, metrics)
    watch_draft(metrics, worker.load, built.identity)
    with worker_metrics(metrics, settings, "draft", settings.worker_id):
        return serve(
            serve_draft(
                worker,
                settings.listen,
                tokenizer_json=built.tokenizer_json,
                on_ready=say_serving,
                lease=make_lease(settings, worker),
                options=serve_options(settings, settings.listen),
            )
        )


@dataclass(frozen=True, slots=True)
class Built:
    """A drafter, and of one with a model what its vocabulary needs."""

    drafter: Drafter
    identity: Identity
    make_mask: MaskFactory | None = None
    tokenizer_json: bytes | None = None


def build_ngram(settings: DraftSettings) -> Built:
    """It looks tokens up and draws none, so that no mask would change them. Raises StartError."""
    from specdec.drafters.ngram import NgramDrafter

    try:
        drafter = NgramDrafter(settings.ngram_min, settings.ngram_max)
    except ValueError as error:
        raise StartError(str(error), ExitCode.WRONG_USE) from error
    return Built(drafter, Identity(settings.worker_id, Role.DRAFT, "", version=__version__, drafter=drafter.name))


def build_model(settings: DraftSettings) -> Built:
    """Imports torch. Raises StartError."""
    if settings.model is None:
        raise StartError("drafter `model` needs a model: name it with --model", ExitCode.WRONG_USE)
    from services.masks import mask_factory
    from specdec.drafters.model import ModelDrafter

    folder = model_folder(settings.model)
    name = served_name(settings.model, folder)
    try:
        bundle = load_bundle(folder, name)
        digest = VocabularyDigest.of(bundle.tokenizer_json)
    except InvalidTokenizer as error:
        raise StartError(f"{folder} has no tokenizer that can be read: {error}") from error
    start = time.monotonic()
    log.info("loading %s from %s", name, folder)
    model = load_model(settings, folder, DRAFT_PATIENCE, drafts=True, quantization=settings.quantization)
    log.info("loaded %s on %s in %s after %.1f s", name, model.device, model.dtype, time.monotonic() - start)
    drafter = ModelDrafter(model)
    identity = model_identity(settings.worker_id, Role.DRAFT, name, model, digest)
    make_mask = mask_factory(bundle.tokenizer_json, model.vocabulary_size, bundle.stop_token_ids)
    return Built(drafter, replace(identity, drafter=drafter.name), make_mask, bundle.tokenizer_json)
