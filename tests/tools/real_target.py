"""A target worker process with a real model: `python -m tools.real_target --listen unix:/path --model FOLDER`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from services.target_process import read_bundle
from services.worker_process import ServeOptions, serve_target
from services.worker_start import model_identity
from specdec.engine.loading import load
from specdec.messages import Role
from specdec.vocabulary import VocabularyDigest
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.process import SECRET, end_with_starter, say_ready


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True, help="HOST:PORT or unix:PATH")
    parser.add_argument("--worker-id", default="target")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    end_with_starter()
    # The same folder passed the self-test in the process of the tests.
    model = load(options.model, dtype=options.dtype, threads=1, self_test=False)
    bundle = read_bundle(options.model, options.model.name)
    digest = VocabularyDigest.of(bundle.tokenizer_json)
    worker = TargetWorker(
        TargetConfig(options.worker_id, SECRET),
        model,
        model_identity(options.worker_id, Role.TARGET, options.model.name, model, digest),
    )
    asyncio.run(serve_target(worker, bundle, options.listen, on_ready=say_ready, options=ServeOptions(grace=5.0)))


if __name__ == "__main__":
    main()
