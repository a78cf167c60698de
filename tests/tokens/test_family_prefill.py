"""The text of a last assistant message in an open turn: as each family's template writes it, or refused."""

import pytest
import tokens_kit as kit
from family_fixtures import FAMILIES, family_folder

from polarnode.core.conversation import Conversation, Message
from polarnode.core.errors import Refused

QUESTION = Message(role="user", text="Count.")
PREFILL = "1, 2 <|im_end|>"  # a control string of a client is text here too
# their templates open a thought before each answer, whatever is asked
THINKS_ALWAYS = {"deepseek_v3", "deepseek_r1_distill", "minimax_m2"}
# its template writes a line's end there where it shows an answer, and none where it opens one
OTHER_OPENING = {"glm4": "\n"}


@pytest.mark.parametrize("thinking", [None, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_as_template_writes(name: str, thinking: bool | None) -> None:
    model = kit.model(family_folder(name))
    asked = Conversation(messages=(QUESTION,), thinking=thinking)
    if name in THINKS_ALWAYS:
        with pytest.raises(Refused, match="begins each answer with a thought"):
            model.template.root(asked, prefill=PREFILL)
        return
    prompt = model.template.root(asked, prefill=PREFILL)
    inert = list(model.tokenizer.encode_plain(PREFILL))
    assert list(prompt[-len(inert) :]) == inert
    assert not model.template.opens_thinking(prompt)
    shown = [{"role": "user", "content": QUESTION.text}, {"role": "assistant", "content": "MARK"}]
    written = model.tokenizer.render(shown, tools=[], generation_prompt=False, thinking=thinking)
    begin = written[: written.rindex("MARK")].removesuffix(OTHER_OPENING.get(name, ""))
    assert model.text(prompt[: -len(inert)]) == begin


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - THINKS_ALWAYS))
def test_prefill_after_sampled_turn(name: str) -> None:
    """After a sampled turn the opening is the one after a conversation's head."""
    model = kit.model(family_folder(name))
    asked = Conversation(messages=(QUESTION, Message(role="assistant", text="One."), QUESTION))
    ended = model.template.root(Conversation(messages=(QUESTION,)))
    ended.extend([*model.tokenizer.encode_plain("One."), model.template.stop_ids[0]])
    plain = model.template.suffix((QUESTION,), conversation=asked, sampled=ended).ids
    opened = model.template.suffix((QUESTION,), conversation=asked, sampled=ended, prefill="1, 2").ids
    root = model.template.root(Conversation(messages=(QUESTION,)))
    root_opened = model.template.root(Conversation(messages=(QUESTION,)), prefill="1, 2")
    shared = next(
        (at for at, pair in enumerate(zip(root, root_opened, strict=False)) if pair[0] != pair[1]), len(root)
    )
    rest = len(root) - shared
    assert list(opened) == [*plain[: len(plain) - rest], *root_opened[shared:]]
