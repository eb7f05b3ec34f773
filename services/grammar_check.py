"""What the gateway says of a grammar before anything is opened: no model, no torch."""

from __future__ import annotations

from specdec import grammars
from specdec.params import Grammar


def check(grammar: Grammar) -> None:
    """Compiles it, for up to some tenths of a second: call it in a thread, where it leaves the others running. What
    only a tokenizer can tell, a special token in a grammar or that no text matches, the target worker refuses at open.
    Raises InvalidGrammar.
    """
    grammars.check(grammar)
