"""A served model as the gateway holds it: its tokenizer and chat template, from a target's bundle."""

from __future__ import annotations

from dataclasses import dataclass

from services.chat import ChatTemplate
from services.tokenizer import InvalidTokenizer, Tokenizer
from specdec.messages import TokenizerBundle


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """vocabulary_sha256: of the target that the bundle was taken from, to notice that another one serves now."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocabulary_sha256: str

    @property
    def bundle(self) -> TokenizerBundle:
        return self.tokenizer.bundle

    @classmethod
    def load(cls, bundle: TokenizerBundle, vocabulary_sha256: str) -> LoadedModel:
        """Takes up to a second for a large vocabulary. Raises InvalidTokenizer."""
        template = None
        if bundle.chat_template is not None:
            try:
                template = ChatTemplate(bundle.chat_template, bundle.special_tokens)
            except ValueError as error:
                raise InvalidTokenizer(str(error)) from error
        return cls(bundle.model_name, Tokenizer(bundle), template, vocabulary_sha256)
