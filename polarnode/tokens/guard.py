"""Client text made inert while a template renders it, and restored afterwards.

A control string is recognised by its first letter: wherever a client's string holds that letter, a letter
that nobody used stands for it during the render. So no client text can become control text, neither alone nor
joined with what the template puts beside it, and it cannot steer the template. A stand-in is one letter for
one letter: lengths and JSON escapes stay as they are.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from attrs import frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import Refused

# private use: no keyboard, no template and hardly a text has them; JSON and strip() let them be
_STAND_INS: Final = range(0xE5E5, 0xF900)
# levels of nested JSON; real tool schemas have about ten, and Python's own JSON writer gives up at a thousand
_DEEPEST: Final = 100


@frozen(kw_only=True)
class Guard:
    """Which letters stand for which, for one render."""

    _to: Mapping[int, str]
    _back: Mapping[str, str]

    @classmethod
    def over(cls, letters: Iterable[str], values: Iterable[Json]) -> "Guard":
        """A guard whose stand-ins occur in none of these values. Refused for text that is no Unicode or
        nested beyond reason.
        """
        texts = list(_texts(list(values), 0))
        _check_unicode(texts)
        free = (chr(code) for code in _STAND_INS if not any(chr(code) in text for text in texts))
        back: dict[str, str] = {}
        for letter in letters:
            stand_in = next(free, None)
            if stand_in is None:
                raise Refused(
                    "the conversation holds every character polarnode could use to mark its text: remove some"
                    " private-use characters"
                )
            back[stand_in] = letter
        return cls(to={ord(letter): stand_in for stand_in, letter in back.items()}, back=back)

    def hide(self, value: Json) -> Json:
        """The same value with every string of it inert, keys included."""
        match value:
            case str():
                return self._hidden(value)
            case list():
                return [self.hide(item) for item in value]
            case dict():
                return {self._hidden(key): self.hide(item) for key, item in value.items()}
            case _:
                return value

    def show(self, text: str) -> str:
        """The text as the client wrote it."""
        for stand_in, letter in self._back.items():
            text = text.replace(stand_in, letter)
        return text

    def _hidden(self, text: str) -> str:
        for letter, stand_in in self._to.items():
            text = text.replace(chr(letter), stand_in)
        return text


def _texts(value: Json, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise Refused(f"the conversation holds JSON nested deeper than {_DEEPEST} levels: flatten it")
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item, depth + 1)
        case dict():
            yield from value
            for item in value.values():
                yield from _texts(item, depth + 1)
        case _:
            return


def _check_unicode(texts: list[str]) -> None:
    try:
        for text in texts:
            if not text.isascii():
                text.encode()
    except UnicodeEncodeError as error:
        raise Refused(
            "the conversation holds half of a surrogate pair, which is no character: send valid Unicode"
        ) from error
