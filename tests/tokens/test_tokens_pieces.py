"""What is remembered of long texts is what encoding them gives, whoever asks, in bounded memory."""

from array import array
from concurrent.futures import ThreadPoolExecutor

import tokens_kit as kit
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from polarnode.core.arrays import ids
from polarnode.core.conversation import Conversation, Message
from polarnode.tokens.template import Template
from polarnode.tokens.tokenizer import MIN_CACHED_CHARS, TokenizationCache


@define
class Counted:
    """An encoder of letters that knows what it was asked."""

    asked: list[str] = field(factory=list)

    def encode(self, text: str) -> list[int]:
        self.asked.append(text)
        return [ord(letter) for letter in text]


def test_repeated_text_is_encoded_once() -> None:
    pieces, counted = TokenizationCache(), Counted()
    assert [pieces.ids("ab", counted.encode) for _ in range(3)] == [ids([97, 98])] * 3
    assert counted.asked == ["ab"]


@given(texts=st.lists(st.text(max_size=6), max_size=60), kept_bytes=st.integers(0, 3000))
def test_ids_match_text_with_small_cache(texts: list[str], kept_bytes: int) -> None:
    """Ids are those of the text however little is kept."""
    pieces, counted = TokenizationCache(kept_bytes=kept_bytes), Counted()
    for text in texts:
        assert pieces.ids(text, counted.encode) == ids(map(ord, text))


def test_unused_texts_are_evicted() -> None:
    """Texts that are asked for again stay, and others are evicted."""
    pieces, counted = TokenizationCache(kept_bytes=20_000), Counted()
    for number in range(1000):
        pieces.ids("the head of a group", counted.encode)
        pieces.ids(f"a text that comes once {number}", counted.encode)
    assert counted.asked.count("the head of a group") == 1
    pieces.ids("a text that comes once 0", counted.encode)
    assert counted.asked.count("a text that comes once 0") == 2


def test_oversized_text_is_not_kept() -> None:
    pieces, counted = TokenizationCache(kept_bytes=1000), Counted()
    pieces.ids("little", counted.encode)
    pieces.ids("x" * 1000, counted.encode)
    pieces.ids("x" * 1000, counted.encode)
    pieces.ids("little", counted.encode)
    assert [len(text) for text in counted.asked] == [6, 1000, 1000]


def test_concurrent_threads_get_equal_ids() -> None:
    pieces, counted = TokenizationCache(kept_bytes=10_000), Counted()
    texts = [f"text {number % 40}" * 3 for number in range(2000)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: pieces.ids(text, counted.encode), texts))
    assert found == [ids(map(ord, text)) for text in texts]


# ── in a template ─────────────────────────────────────────────────────────────

_LONG = st.builds(
    lambda text, size: (text * size)[:5000], kit.hostile, st.sampled_from([1, 300, MIN_CACHED_CHARS])
)


@settings(max_examples=40, deadline=None)
@given(said=st.lists(_LONG, min_size=1, max_size=3), more=_LONG)
def test_seen_template_renders_same_ids(said: list[str], more: str) -> None:
    """A conversation has the same ids from a template that has seen it."""
    model = kit.model()
    messages = (Message(role="system", text=said[0]), *(Message(role="user", text=text) for text in said))
    first = Conversation(messages=messages)
    second = evolve(first, messages=(*messages, Message(role="user", text=more)))
    expected = [
        Template(model.template.tokenizer, model.template.family).root(each) for each in (first, second)
    ]
    shared = Template(model.template.tokenizer, model.template.family)
    assert [shared.root(each) for each in (first, second, first, second)] == expected * 2


def test_group_sessions_share_their_head() -> None:
    """The ids that are handed out are a caller's own, whatever it does with them."""
    model = kit.model()
    head = Message(role="system", text="You are careful. " * 200)
    asked = Conversation(messages=(head, Message(role="user", text="hi")))
    template = Template(model.template.tokenizer, model.template.family)
    one: array[int] = template.root(asked)
    expected = one[:]
    one.extend([1, 2, 3])
    assert template.root(asked) == expected
