"""What the draft worker does with a message: the rules of the log, applied to one sequence.

Its replica is rebuilt from the log alone. A base beyond it asks for the missing tokens; a base within it with the same
digest rolls it back; with another digest the message is stale and dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from draft_worker.config import DraftConfig
from draft_worker.fan_out import FanOut
from draft_worker.sequence import DraftSequence
from specdec.drafter import Drafter
from specdec.grammar import InvalidGrammar, MaskFactory, TokenMask
from specdec.log import Log, Place
from specdec.messages import (
    DraftAdvance,
    DraftItem,
    DraftOpen,
    DraftPlan,
    DraftResult,
    Epoch,
    Header,
    Load,
    NeedTokens,
    Refusal,
    RefusalReason,
    Release,
    Released,
)
from specdec.params import SamplingParams

_EPOCHS_REMEMBERED = 65536


class Intake:
    """The open sequences and the epochs of those released, so that a late message of an old owner stays refused."""

    def __init__(
        self,
        config: DraftConfig,
        drafter: Drafter,
        vocabulary_size: int,
        load: Load,
        make_mask: MaskFactory | None = None,
    ) -> None:
        self._config = config
        self._make_mask = make_mask
        self._drafter = drafter
        self._vocabulary_size = vocabulary_size
        self._load = load
        self._released: OrderedDict[str, Epoch] = OrderedDict()
        self.sequences: dict[str, DraftSequence] = {}
        self.draining = False

    def take(self, session: int, item: DraftItem, now: float) -> DraftResult | None:
        """Applies one item; the result, if there is one at once, is addressed to `session`."""
        header, body = item.header, item.body
        sequence = self.sequences.get(header.sequence_id)
        held = sequence.epoch if sequence else self._released.get(header.sequence_id)
        if held is not None and not header.epoch.may_replace(held):
            message = f"epoch {header.epoch.number} of {header.epoch.owner}, held is {held.number} of {held.owner}"
            return self._refuse(header, RefusalReason.EPOCH, message, held)
        if isinstance(body, Release):
            self.release(header.sequence_id, header.epoch)
            return DraftResult(header, Released())
        wrong = self._wrong_token(body.token_ids)
        if wrong is not None:
            return self._refuse(header, RefusalReason.INVALID, wrong)
        if isinstance(body, DraftOpen):
            return self._open(session, header, body, now)
        if sequence is None or sequence.epoch != header.epoch:
            return self._refuse(header, RefusalReason.UNKNOWN_SEQUENCE, "not open here under this epoch", held)
        sequence.session = session
        return self._advance(sequence, header, body, now)

    def _open(self, session: int, header: Header, body: DraftOpen, now: float) -> DraftResult | None:
        if self.draining:
            return self._refuse(header, RefusalReason.DRAINING, "this worker is draining")
        if header.sequence_id not in self.sequences and len(self.sequences) >= self._config.max_sequences:
            message = f"{len(self.sequences)} sequences are open, the limit is {self._config.max_sequences}"
            return self._refuse(header, RefusalReason.CAPACITY, message)
        log = Log(body.root_digest, body.token_ids, self._config.secret)
        if log.digest != header.prefix_digest or len(log) != header.base_length:
            message = "prefix_digest is not that of token_ids: do scheduler and worker share one secret?"
            return self._refuse(header, RefusalReason.INVALID, message)
        self._forget(header.sequence_id)
        self._released.pop(header.sequence_id, None)
        sequence = DraftSequence(
            header.sequence_id,
            session,
            header.epoch,
            log,
            body.sampling,
            body.stop,
            self._trimmed(body.plan),
            FanOut(header.sequence_id, body.root_digest, self._config.secret),
            self._mask(body.sampling),
            committed_length=len(log),
        )
        self.sequences[header.sequence_id] = sequence
        sequence.order(sequence.plan, now)
        return None

    def _advance(self, sequence: DraftSequence, header: Header, body: DraftAdvance, now: float) -> DraftResult | None:
        place = sequence.log.place(header.base_length, header.prefix_digest)
        if place is Place.BEYOND:
            return DraftResult(header, NeedTokens(len(sequence.log)))
        if place is Place.STALE:
            self._load.stale_blocks += 1
            return None
        sequence.advance(header.base_length, body.token_ids)
        sequence.order(self._trimmed(body.plan), now)
        return None

    def release(self, sequence_id: str, epoch: Epoch) -> None:
        """Frees the sequence and remembers its epoch."""
        self._forget(sequence_id)
        self._released[sequence_id] = epoch
        self._released.move_to_end(sequence_id)
        if len(self._released) > _EPOCHS_REMEMBERED:
            self._released.popitem(last=False)

    def _forget(self, sequence_id: str) -> None:
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is not None:
            for job_id in (sequence_id, *sequence.fan_out.job_ids):
                self._drafter.release(job_id)

    def _mask(self, sampling: SamplingParams) -> TokenMask | None:
        """None where the drafter has no grammar engine, or not for this grammar: what it proposes is then rejected
        where the grammar forbids it, and nothing is lost but time."""
        if sampling.grammar is None or self._make_mask is None:
            return None
        try:
            return self._make_mask(sampling.grammar)
        except InvalidGrammar:
            return None

    def _trimmed(self, plan: DraftPlan) -> DraftPlan:
        return replace(
            plan,
            draft_length=min(plan.draft_length, self._config.max_draft_length),
            width=min(plan.width, self._config.max_width),
            window=min(plan.window, self._config.max_window),
        )

    def _wrong_token(self, token_ids: Sequence[int]) -> str | None:
        size = self._vocabulary_size
        wrong = next((i for i, t in enumerate(token_ids) if t < 0 or (size and t >= size)), None)
        return None if wrong is None else f"token_ids[{wrong}] is {token_ids[wrong]}, must be in [0, {size})"

    def _refuse(self, header: Header, reason: RefusalReason, message: str, held: Epoch | None = None) -> DraftResult:
        self._load.refused_items += 1
        return DraftResult(header, Refusal(reason, message, held))
