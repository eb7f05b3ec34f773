"""What the target worker does with a message: the rules of the log, applied to one sequence.

A base beyond the log holds the block; a base within it with another digest is stale; with the same digest the worker
never takes back a committed token: it tells the tokens since, and verifies what lies below them in the tree.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from specdec.candidates import InvalidCandidates
from specdec.engine.model import LanguageModel
from specdec.grammar import GRAMMAR_REFUSED, InvalidGrammar, MaskFactory, TokenMask
from specdec.law import Law
from specdec.log import Log, Place
from specdec.messages import (
    Epoch,
    Header,
    Load,
    NeedTokens,
    Opened,
    Refusal,
    RefusalReason,
    Release,
    Released,
    StaleBlock,
    TargetItem,
    TargetOpen,
    TargetResult,
    VerifyBlock,
)
from specdec.metric import NO_COUNTERS, Counters
from specdec.params import SamplingParams
from target_worker import counters as metrics
from target_worker.config import TargetConfig
from target_worker.sequence import TargetSequence

_EPOCHS_REMEMBERED = 65536


class Intake:
    """The open sequences and the epochs of those released, so that a late message of an old owner stays refused."""

    def __init__(
        self,
        config: TargetConfig,
        model: LanguageModel,
        load: Load,
        make_mask: MaskFactory | None = None,
        counters: Counters = NO_COUNTERS,
    ) -> None:
        self._config = config
        self._counters = counters
        self._make_mask = make_mask
        self._model = model
        self._load = load
        self._released: OrderedDict[str, Epoch] = OrderedDict()
        self.sequences: dict[str, TargetSequence] = {}
        self.draining = False

    def take(self, session: int, item: TargetItem, now: float) -> list[TargetResult]:
        """Applies one item; results are addressed to `session`."""
        header, body = item.header, item.body
        held = self._held_epoch(header.sequence_id)
        if held is not None and not header.epoch.may_replace(held):
            message = f"epoch {header.epoch.number} of {header.epoch.owner}, held is {held.number} of {held.owner}"
            return [self._refuse(header, RefusalReason.EPOCH, message, held)]
        if isinstance(body, TargetOpen):
            return [self._open(session, header, body, now)]
        sequence = self.sequences.get(header.sequence_id)
        if isinstance(body, Release):
            self.release(header.sequence_id, header.epoch)
            return [TargetResult(header, Released())]
        if sequence is None or header.epoch != sequence.epoch:
            return [self._refuse(header, RefusalReason.UNKNOWN_SEQUENCE, "not open here under this epoch", held)]
        sequence.session = session
        return self._verify(sequence, header, body, now)

    def release(self, sequence_id: str, epoch: Epoch | None = None) -> None:
        """Frees the sequence and remembers its epoch."""
        sequence = self.sequences.pop(sequence_id, None)
        epoch = epoch or (sequence.epoch if sequence else None)
        if epoch is not None:
            self._released[sequence_id] = epoch
            self._released.move_to_end(sequence_id)
            if len(self._released) > _EPOCHS_REMEMBERED:
                self._released.popitem(last=False)
        if sequence is not None:
            self._model.release(sequence_id)

    def reconsider_held(self, sequence: TargetSequence) -> list[TargetResult]:
        """After the log grew: held blocks whose base it has reached are judged as if they arrived now."""
        reached = [block for block in sequence.held if block[0].base_length <= len(sequence.log)]
        sequence.held = [block for block in sequence.held if block[0].base_length > len(sequence.log)]
        results: list[TargetResult] = []
        for header, block in reached:
            results += self._apply(sequence, header, block, tell=False)
        return results

    def _held_epoch(self, sequence_id: str) -> Epoch | None:
        sequence = self.sequences.get(sequence_id)
        return sequence.epoch if sequence else self._released.get(sequence_id)

    def _open(self, session: int, header: Header, body: TargetOpen, now: float) -> TargetResult:
        existing = self.sequences.get(header.sequence_id)
        if existing is not None and existing.epoch == header.epoch:
            return TargetResult(header, Opened())  # a retry: only a higher epoch resets a log
        if self.draining:
            return self._refuse(header, RefusalReason.DRAINING, "this worker is draining")
        if existing is None and len(self.sequences) >= self._config.max_sequences:
            message = f"{len(self.sequences)} sequences are open, the limit is {self._config.max_sequences}"
            return self._refuse(header, RefusalReason.CAPACITY, message)
        log = Log(body.root_digest, body.token_ids, self._config.secret)
        problem = self._problem(header, body, log)
        if problem:
            return self._refuse(header, RefusalReason.INVALID, problem)
        try:
            law = Law(body.sampling, body.stop, log.token_ids, self._mask(body.sampling))
        except InvalidGrammar as error:
            return self._refuse(header, RefusalReason.INVALID, GRAMMAR_REFUSED + str(error))
        if existing is not None:
            self._model.release(header.sequence_id)
        self._released.pop(header.sequence_id, None)
        deadline = math.inf if header.time_remaining is None else now + header.time_remaining
        self.sequences[header.sequence_id] = TargetSequence(
            header.sequence_id,
            session,
            header.epoch,
            log,
            opened_length=len(log),
            law=law,
            grant=body.grant,
            waiting_since=now,
            report=body.report,
            deadline=deadline,
        )
        cached_length = self._model.open(header.sequence_id, log)
        self._load.prefix_hit_tokens += cached_length
        self._counters.add(metrics.PREFIX_CACHE_QUERIES, len(log))
        return TargetResult(header, Opened(cached_length))

    def _problem(self, header: Header, body: TargetOpen, log: Log) -> str | None:
        """Why a sequence cannot be opened as asked, naming field and range; None if it can."""
        length, vocabulary_size = len(log), self._model.vocabulary_size
        if not length:
            return "token_ids is empty, at least one token is needed"
        wrong = next((i for i, t in enumerate(body.token_ids) if not 0 <= t < vocabulary_size), None)
        if wrong is not None:
            return f"token_ids[{wrong}] is {body.token_ids[wrong]}, must be in [0, {vocabulary_size})"
        if header.base_length != length:
            return f"base_length is {header.base_length}, must be the {length} of token_ids"
        if header.prefix_digest != log.digest:
            return "prefix_digest is not that of token_ids: do scheduler and worker share one secret?"
        if not length < body.stop.max_length <= self._model.context_length:
            return f"max_length is {body.stop.max_length}, must be in ({length}, {self._model.context_length}]"
        try:
            body.sampling.validate()
        except ValueError as error:
            return str(error)
        for field, token_ids in body.sampling.token_ids().items():
            if any(not 0 <= token_id < vocabulary_size for token_id in token_ids):
                return f"{field} names a token that is not in [0, {vocabulary_size})"
        return None

    def _mask(self, sampling: SamplingParams) -> TokenMask | None:
        """Raises InvalidGrammar."""
        if sampling.grammar is None:
            return None
        if self._make_mask is None:
            raise InvalidGrammar("this worker has no grammar engine")
        return self._make_mask(sampling.grammar)

    def _verify(self, sequence: TargetSequence, header: Header, block: VerifyBlock, now: float) -> list[TargetResult]:
        try:
            block.candidates.validate_for(sequence.law.params.accept_rule, self._model.vocabulary_size)
        except InvalidCandidates as error:
            return [self._refuse(header, RefusalReason.INVALID, str(error))]
        sequence.grant = block.grant
        sequence.waiting_since = now
        if sequence.log.place(header.base_length, header.prefix_digest) is not Place.BEYOND:
            return self._apply(sequence, header, block, tell=True)
        if not len(block.candidates):
            return [TargetResult(header, NeedTokens(len(sequence.log)))]
        if len(sequence.held) >= self._config.held_blocks:  # the oldest was drafted on what has been rejected since
            sequence.held.pop(0)
            self._load.stale_blocks += 1
        sequence.held.append((header, block))
        return []

    def _apply(self, sequence: TargetSequence, header: Header, block: VerifyBlock, tell: bool) -> list[TargetResult]:
        """A block whose base the log has reached. tell: answer with the tokens committed since its base."""
        log = sequence.log
        place = log.place(header.base_length, header.prefix_digest)
        if place is Place.STALE or header.base_length < sequence.opened_length:
            return [self._stale(sequence, header)]
        since = log.since(header.base_length)
        results: list[TargetResult] = []
        if tell and since:
            results.append(TargetResult(header, sequence.told_since(header.base_length)))
        if sequence.finished:
            return results
        if not since:
            sequence.pending = block.candidates
        elif len(block.candidates):
            below = block.candidates.below(since)
            if below is None or not len(below):
                results.append(self._stale(sequence, header))
            else:
                sequence.pending = below
        return results

    def _stale(self, sequence: TargetSequence, header: Header) -> TargetResult:
        self._load.stale_blocks += 1
        return TargetResult(header, StaleBlock(len(sequence.log)))

    def _refuse(self, header: Header, reason: RefusalReason, message: str, held: Epoch | None = None) -> TargetResult:
        self._load.refused_items += 1
        return TargetResult(header, Refusal(reason, message, held))
