"""Which of a tokenizer's added tokens are control tokens, and whether they can be kept apart from text.

A control token is one that a text can not become: it stands in a prompt only where the template wrote it. Some tokenizers also list ordinary
text as added tokens (Gemma: runs of newlines, HTML tags), which mean nothing and must be found in a client's text as in any other. Whoever
edits this: when in doubt a token is a control token, for then no client can write it.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken

from polarnode.errors import ModelError


def ordinary(vocabulary: Mapping[str, int], added: Mapping[int, AddedToken], template: str) -> dict[int, AddedToken]:
    """Those that are text: of the vocabulary itself, and neither called special nor named by the template (which any newline is)."""
    return {
        number: token
        for number, token in added.items()
        if not token.special and vocabulary.get(token.content) == number and (token.content.isspace() or token.content not in template)
    }


def check_flags(control: Mapping[int, AddedToken], normalizer: Any, written: str) -> None:
    """Control strings must mean exactly themselves in what a template writes, or a render could not be split on them.

    `written` is all that is known of it: the template's source and what it renders. A flag of a token that is never there does nothing.
    """
    for token in control.values():
        swallows = token.lstrip or token.rstrip or token.single_word
        if (swallows and token.content in written) or (token.normalized and not _stays(token.content, normalizer)):
            raise ModelError(f"its control token {token.content!r} swallows or changes text beside it: such tokenizers are not supported")


def _stays(text: str, normalizer: Any) -> bool:
    return normalizer is None or normalizer.normalize_str(f"a{text}a") == f"a{text}a"
