"""How a token is drawn and what is told of it, to and from the wire."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

from outrider.v1 import types_pb2 as pb
from services.codec import InvalidMessage, decode_token_ids
from specdec.messages import TokenLogprobs
from specdec.params import AcceptRule, Grammar, GrammarKind, LogprobsOf, Report, SamplingParams

ACCEPT_RULES = {
    AcceptRule.INVARIANT: pb.ACCEPT_RULE_INVARIANT,
    AcceptRule.REJECTION: pb.ACCEPT_RULE_REJECTION,
    AcceptRule.BLOCK: pb.ACCEPT_RULE_BLOCK,
}
ACCEPT_RULES_BACK = {value: key for key, value in ACCEPT_RULES.items()}
LOGPROBS_OF = {LogprobsOf.RAW: pb.LOGPROBS_OF_RAW, LogprobsOf.PROCESSED: pb.LOGPROBS_OF_PROCESSED}
LOGPROBS_OF_BACK = {value: key for key, value in LOGPROBS_OF.items()}


def encode_sampling(sampling: SamplingParams) -> pb.SamplingParameters:
    message = pb.SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        bad_words=[pb.TokenSequence(token_ids=word) for word in sampling.bad_words],
        allowed_token_ids=sampling.allowed_token_ids,
        accept_rule=ACCEPT_RULES[sampling.accept_rule],
    )
    if sampling.grammar is not None:
        message.grammar.CopyFrom(encode_grammar(sampling.grammar))
    return message


def decode_sampling(message: pb.SamplingParameters, field: str) -> SamplingParams:
    """Raises InvalidMessage."""
    if message.accept_rule not in ACCEPT_RULES_BACK:
        raise InvalidMessage(f"{field}.accept_rule", f"is {message.accept_rule}, which is no accept rule")
    sampling = SamplingParams(
        message.temperature,
        message.top_k,
        message.top_p,
        message.min_p,
        message.seed,
        message.typical_p,
        message.repetition_penalty,
        message.presence_penalty,
        message.frequency_penalty,
        tuple((bias.token_id, bias.bias) for bias in message.logit_bias),
        tuple(decode_token_ids(word.token_ids, f"{field}.bad_words") for word in message.bad_words),
        decode_token_ids(message.allowed_token_ids, f"{field}.allowed_token_ids"),
        ACCEPT_RULES_BACK[message.accept_rule],
        decode_grammar(message.grammar, f"{field}.grammar") if message.HasField("grammar") else None,
    )
    try:
        sampling.validate()
    except ValueError as error:
        raise InvalidMessage(field, str(error)) from error
    return sampling


def encode_grammar(grammar: Grammar) -> pb.Grammar:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return pb.Grammar(json_schema=grammar.text)
        case GrammarKind.JSON_OBJECT:
            return pb.Grammar(json_object=True)
        case GrammarKind.REGEX:
            return pb.Grammar(regex=grammar.text)
        case GrammarKind.CHOICE:
            return pb.Grammar(choice=pb.ChoiceList(texts=json.loads(grammar.text)))
        case GrammarKind.LARK:
            return pb.Grammar(lark=grammar.text)


def decode_grammar(message: pb.Grammar, field: str) -> Grammar:
    """Raises InvalidMessage."""
    match message.WhichOneof("kind"):
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, message.json_schema)
        case "json_object" if message.json_object:
            return Grammar(GrammarKind.JSON_OBJECT)
        case "regex":
            return Grammar(GrammarKind.REGEX, message.regex)
        case "choice":
            return Grammar(GrammarKind.CHOICE, json.dumps(list(message.choice.texts)))
        case "lark":
            return Grammar(GrammarKind.LARK, message.lark)
    raise InvalidMessage(field, "has no kind, must be json_schema, json_object: true, regex, choice or lark")


def encode_report(report: Report) -> pb.Report:
    return pb.Report(
        top_logprobs=report.top_logprobs,
        logprobs_of=LOGPROBS_OF[report.logprobs_of],
        margins=report.margins,
        noise=report.noise,
    )


def decode_report(message: pb.Report, field: str) -> Report:
    """An absent report asks for nothing. Raises InvalidMessage."""
    if message.logprobs_of not in (pb.LOGPROBS_OF_UNSPECIFIED, *LOGPROBS_OF_BACK):
        raise InvalidMessage(f"{field}.logprobs_of", f"is {message.logprobs_of}, which is no law")
    if not 0 <= message.noise < math.inf:
        raise InvalidMessage(f"{field}.noise", f"is {message.noise}, must be finite and at least 0")
    return Report(
        message.top_logprobs if message.HasField("top_logprobs") else None,
        LOGPROBS_OF_BACK.get(message.logprobs_of, LogprobsOf.RAW),
        message.margins,
        message.noise,
    )


def encode_logprobs(logprobs: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            logprob=token.logprob,
            top=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top],
        )
        for token in logprobs
    ]


def decode_logprobs(messages: Sequence[pb.TokenLogprobs], count: int, field: str) -> tuple[TokenLogprobs, ...]:
    """None or one for each of `count` tokens. Raises InvalidMessage."""
    if not messages:
        return ()
    if len(messages) != count:
        raise InvalidMessage(field, f"has {len(messages)} entries for {count} tokens")
    decoded = tuple(
        TokenLogprobs(token.logprob, tuple((top.token_id, top.logprob) for top in token.top)) for token in messages
    )
    if any(math.isnan(token.logprob) for token in decoded):
        raise InvalidMessage(field, "holds a logprob that is not a number")
    return decoded
