"""`GenerationService` on the wire: requests in, events out."""

from __future__ import annotations

from outrider.v1 import generation_service_pb2 as pb
from scheduler.errors import InvalidRequest
from scheduler.request import Speculation, SpeculationSummary
from services.codec import encode_duration, encode_finish_reason, encode_sources
from services.gateway import ServedModel
from services.generation import (
    ChatMessage,
    ChatPrompt,
    ChoiceFinished,
    ChoiceStarted,
    GatewayEvent,
    Prompt,
    TextPrompt,
    TextTokens,
    TokenPrompt,
    UserRequest,
)

_SPECULATION = {
    pb.SPECULATION_MODE_UNSPECIFIED: Speculation.AUTO,
    pb.SPECULATION_MODE_AUTO: Speculation.AUTO,
    pb.SPECULATION_MODE_ON: Speculation.ON,
    pb.SPECULATION_MODE_OFF: Speculation.OFF,
}


def decode_request(
    message: pb.GenerateRequest, timeout: float | None = None, traceparent: str = "", tracestate: str = ""
) -> UserRequest:
    """timeout: seconds left of the call's deadline. Raises InvalidRequest for an unknown speculation mode."""
    if message.speculation not in _SPECULATION:
        raise InvalidRequest("speculation", f"speculation is {message.speculation}, must be auto, on or off")
    return UserRequest(
        prompt=_decode_prompt(message),
        model=message.model,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        seed=message.seed if message.HasField("seed") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        speculation=_SPECULATION[message.speculation],
        draft_length=message.draft_length if message.HasField("draft_length") else None,
        timeout=timeout,
        request_id=message.request_id,
        traceparent=traceparent,
        tracestate=tracestate,
    )


def _decode_prompt(message: pb.GenerateRequest) -> Prompt | None:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return ChatPrompt(tuple(ChatMessage(item.role, item.content) for item in message.chat.messages))
        case "tokens":
            return TokenPrompt(tuple(message.tokens.token_ids))
        case _:
            return None


def encode_event(event: GatewayEvent) -> pb.GenerateResponse:
    if isinstance(event, TextTokens):
        return pb.GenerateResponse(tokens=_encode_tokens(event))
    if isinstance(event, ChoiceStarted):
        return pb.GenerateResponse(
            started=pb.GenerationStarted(
                sequence_id=event.sequence_id, model=event.model, seed=event.seed, prompt_tokens=event.prompt_tokens
            )
        )
    return pb.GenerateResponse(finished=_encode_finished(event))


def _encode_tokens(event: TextTokens) -> pb.GeneratedTokens:
    return pb.GeneratedTokens(
        position=event.position,
        token_ids=event.token_ids,
        sources=encode_sources(event.sources),
        text=event.text,
        prefix_digest=event.prefix_digest,
        pieces=event.pieces,
    )


def _encode_finished(event: ChoiceFinished) -> pb.GenerationFinished:
    return pb.GenerationFinished(
        finish_reason=encode_finish_reason(event.finish_reason),
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        speculation=_encode_summary(event.speculation),
        duration=encode_duration(event.duration),
        time_to_first_token=encode_duration(event.time_to_first_token),
    )


def _encode_summary(summary: SpeculationSummary) -> pb.SpeculationSummary:
    return pb.SpeculationSummary(
        num_drafts=summary.num_drafts,
        num_draft_tokens=summary.num_draft_tokens,
        num_accepted_tokens=summary.num_accepted_tokens,
        num_accepted_tokens_per_position=summary.num_accepted_tokens_per_position,
        num_plain_steps=summary.num_plain_steps,
        mean_acceptance_length=summary.mean_acceptance_length,
        acceptance_rate=summary.acceptance_rate,
        mode=summary.mode,
        num_failovers=summary.num_failovers,
        num_stale_blocks=summary.num_stale_blocks,
        fallbacks=summary.fallbacks,
    )


def encode_model(model: ServedModel) -> pb.ModelInfo:
    return pb.ModelInfo(name=model.name, context_length=model.context_length, vocabulary_size=model.vocabulary_size)
