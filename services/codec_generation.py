"""`GenerationService` on the wire: requests in, events out."""

from __future__ import annotations

from typing import Any

from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2 as pb_types
from scheduler.errors import InvalidRequest
from scheduler.request import Speculation, SpeculationSummary
from services.codec import InvalidMessage, encode_duration, encode_finish_reason, encode_sources
from services.codec_sampling import ACCEPT_RULES_BACK, LOGPROBS_OF_BACK, decode_grammar, encode_logprobs
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
    Tool,
    ToolCall,
    UserRequest,
)
from specdec.params import Grammar

_SPECULATION = {
    pb.SPECULATION_MODE_UNSPECIFIED: Speculation.AUTO,
    pb.SPECULATION_MODE_AUTO: Speculation.AUTO,
    pb.SPECULATION_MODE_ON: Speculation.ON,
    pb.SPECULATION_MODE_OFF: Speculation.OFF,
}
_OPTIONAL = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "top_logprobs",
    "draft_length",
)


def decode_request(
    message: pb.GenerateRequest, timeout: float | None = None, traceparent: str = "", tracestate: str = ""
) -> UserRequest:
    """timeout: seconds left of the call's deadline. Raises InvalidRequest for an enum value that is none."""
    _check_enums(message)
    present = {field.name for field, _ in message.ListFields()}
    given: dict[str, Any] = {field: getattr(message, field) for field in _OPTIONAL if field in present}
    return UserRequest(
        prompt=_decode_prompt(message),
        model=message.model,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in message.logit_bias),
        bad_words=tuple(message.bad_words),
        bad_word_ids=tuple(tuple(word.token_ids) for word in message.bad_word_ids),
        allowed_token_ids=tuple(message.allowed_token_ids),
        stop=tuple(message.stop),
        include_stop_str_in_output=message.include_stop_str_in_output,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs_of=LOGPROBS_OF_BACK.get(message.logprobs_of),
        echo=message.echo,
        accept_rule=ACCEPT_RULES_BACK.get(message.accept_rule),
        grammar=_decode_grammar(message.grammar) if message.HasField("grammar") else None,
        speculation=_SPECULATION[message.speculation],
        timeout=timeout,
        request_id=message.request_id,
        traceparent=traceparent,
        tracestate=tracestate,
        **given,
    )


def _check_enums(message: pb.GenerateRequest) -> None:
    if message.speculation not in _SPECULATION:
        raise InvalidRequest("speculation", f"speculation is {message.speculation}, must be auto, on or off")
    if message.accept_rule not in (pb_types.ACCEPT_RULE_UNSPECIFIED, *ACCEPT_RULES_BACK):
        raise InvalidRequest(
            "accept_rule", f"accept_rule is {message.accept_rule}, must be invariant, rejection or block"
        )
    if message.logprobs_of not in (pb_types.LOGPROBS_OF_UNSPECIFIED, *LOGPROBS_OF_BACK):
        raise InvalidRequest("logprobs_of", f"logprobs_of is {message.logprobs_of}, must be raw or processed")


def _decode_grammar(message: pb_types.Grammar) -> Grammar:
    try:
        return decode_grammar(message, "grammar")
    except InvalidMessage as error:
        raise InvalidRequest("grammar", str(error)) from None


def _decode_prompt(message: pb.GenerateRequest) -> Prompt | None:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            messages = tuple(_decode_message(item) for item in message.chat.messages)
            tools = tuple(Tool(tool.name, tool.description, tool.parameters) for tool in message.chat.tools)
            return ChatPrompt(messages, tools)
        case "tokens":
            return TokenPrompt(tuple(message.tokens.token_ids))
        case _:
            return None


def _decode_message(message: pb.ChatMessage) -> ChatMessage:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return ChatMessage(message.role, message.content, calls, message.tool_call_id, message.name)


def encode_event(event: GatewayEvent) -> pb.GenerateResponse:
    if isinstance(event, TextTokens):
        response = pb.GenerateResponse()
        _fill_tokens(event, response.tokens)
        return response
    if isinstance(event, ChoiceStarted):
        return pb.GenerateResponse(
            started=pb.GenerationStarted(
                sequence_id=event.sequence_id,
                model=event.model,
                seed=event.seed,
                prompt_tokens=event.prompt_tokens,
                index=event.index,
            )
        )
    return pb.GenerateResponse(finished=_encode_finished(event))


def _fill_tokens(event: TextTokens, message: pb.GeneratedTokens) -> None:
    """In place: there is one per round, and nothing is copied."""
    message.position = event.position
    message.index = event.index
    message.text = event.text
    message.prefix_digest = event.prefix_digest
    message.token_ids.extend(event.token_ids)
    message.sources.extend(encode_sources(event.sources))
    message.pieces.extend(event.pieces)
    if event.logprobs:
        message.logprobs.extend(encode_logprobs(event.logprobs))


def _encode_finished(event: ChoiceFinished) -> pb.GenerationFinished:
    return pb.GenerationFinished(
        finish_reason=encode_finish_reason(event.finish_reason),
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        speculation=_encode_summary(event.speculation),
        duration=encode_duration(event.duration),
        time_to_first_token=encode_duration(event.time_to_first_token),
        index=event.index,
        stop_text=event.stop_text,
        tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in event.tool_calls],
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
