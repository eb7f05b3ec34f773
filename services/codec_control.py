"""Who a worker is and how it does, to and from the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.v1 import control_service_pb2 as pb
from scheduler.scheduler import WorkerView
from services import codec
from services.codec import InvalidMessage
from specdec.messages import Epoch, Identity, Load

_STATES = {
    "connecting": pb.WORKER_STATE_CONNECTING,
    "ready": pb.WORKER_STATE_READY,
    "refused": pb.WORKER_STATE_REFUSED,
    "suspended": pb.WORKER_STATE_SUSPENDED,
    "lost": pb.WORKER_STATE_LOST,
    "draining": pb.WORKER_STATE_DRAINING,
}
_STATES_BACK = {wire: state for state, wire in _STATES.items()}


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One running sequence as `outrider status` shows it. mode: plain, speculative, mixed."""

    sequence_id: str
    epoch: Epoch
    prompt_length: int
    committed_length: int
    target_worker: str = ""
    draft_worker: str = ""
    mode: str = ""


def encode_identity(identity: Identity) -> pb.WorkerIdentity:
    return pb.WorkerIdentity(
        worker_id=identity.worker_id,
        role=codec.encode_role(identity.role),
        model_name=identity.model_name,
        vocabulary_size=identity.vocabulary_size,
        vocabulary_sha256=identity.vocabulary_sha256,
        context_length=identity.context_length,
        version=identity.version,
        protocol_version=identity.protocol_version,
        vocabulary_run_digests=identity.vocabulary_run_digests,
        drafter=identity.drafter,
        device=identity.device,
        dtype=identity.dtype,
        numeric_noise=identity.numeric_noise,
        turns=identity.turns,
    )


def decode_identity(message: pb.WorkerIdentity) -> Identity:
    """Raises InvalidMessage."""
    if not message.worker_id:
        raise InvalidMessage("identity.worker_id", "is missing")
    if not 0 <= message.numeric_noise < math.inf:
        raise InvalidMessage("identity.numeric_noise", f"is {message.numeric_noise}, must be finite and at least 0")
    return Identity(
        worker_id=message.worker_id,
        role=codec.decode_role(message.role, "identity.role"),
        model_name=message.model_name,
        vocabulary_size=message.vocabulary_size,
        vocabulary_sha256=message.vocabulary_sha256,
        vocabulary_run_digests=message.vocabulary_run_digests,
        context_length=message.context_length,
        version=message.version,
        protocol_version=message.protocol_version,
        drafter=message.drafter,
        device=message.device,
        dtype=message.dtype,
        numeric_noise=message.numeric_noise,
        turns=message.turns,
    )


def encode_load(load: Load) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        sequences=load.sequences,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=load.kv_blocks_total,
        steps=load.steps,
        tokens=load.tokens,
        largest_batch=load.largest_batch,
        stale_blocks=load.stale_blocks,
        refused_items=load.refused_items,
        prefix_hit_tokens=load.prefix_hit_tokens,
    )


def decode_load(message: pb.WorkerLoad) -> Load:
    return Load(
        sequences=message.sequences,
        kv_blocks_used=message.kv_blocks_used,
        kv_blocks_total=message.kv_blocks_total,
        steps=message.steps,
        tokens=message.tokens,
        largest_batch=message.largest_batch,
        stale_blocks=message.stale_blocks,
        refused_items=message.refused_items,
        prefix_hit_tokens=message.prefix_hit_tokens,
    )


def encode_worker(view: WorkerView, lease_remaining: float | None = None) -> pb.WorkerStatus:
    """lease_remaining: seconds; None for a worker from a static list."""
    message = pb.WorkerStatus(address=view.address, state=_STATES[view.state], detail=view.detail)
    if view.identity is not None:
        message.identity.CopyFrom(encode_identity(view.identity))
    else:
        message.identity.role = codec.encode_role(view.role)
    if view.load is not None:
        message.load.CopyFrom(encode_load(view.load))
    if lease_remaining is not None:
        message.lease_remaining.CopyFrom(codec.encode_duration(lease_remaining))
    return message


def decode_worker(message: pb.WorkerStatus) -> WorkerView:
    """Raises InvalidMessage. A worker that was not reached yet has a role and no identity."""
    if message.state not in _STATES_BACK:
        raise InvalidMessage("worker.state", f"is {message.state}, which is no state")
    role = codec.decode_role(message.identity.role, "worker.identity.role")
    return WorkerView(
        address=message.address,
        role=role,
        state=_STATES_BACK[message.state],
        detail=message.detail,
        identity=decode_identity(message.identity) if message.identity.worker_id else None,
        load=decode_load(message.load) if message.HasField("load") else None,
    )


def encode_sequence(view: SequenceView) -> pb.SequenceStatus:
    return pb.SequenceStatus(
        sequence_id=view.sequence_id,
        epoch=codec.encode_epoch(view.epoch),
        prompt_length=view.prompt_length,
        committed_length=view.committed_length,
        target_worker=view.target_worker,
        draft_worker=view.draft_worker,
        mode=view.mode,
    )


def decode_sequence(message: pb.SequenceStatus) -> SequenceView:
    return SequenceView(
        sequence_id=message.sequence_id,
        epoch=codec.decode_epoch(message.epoch),
        prompt_length=message.prompt_length,
        committed_length=message.committed_length,
        target_worker=message.target_worker,
        draft_worker=message.draft_worker,
        mode=message.mode,
    )
