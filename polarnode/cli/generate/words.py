"""How the conversations of a generation compare with the tokens they were: rendered by transformers, as an SFT trainer will render them.

The rule for whoever edits it: it reports and changes nothing. A template that refuses a line, or a checkpoint that can not be loaded, is said
and not raised: the data is there all the same.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from polarnode.conversation import Json
from polarnode.errors import ModelError, boundary
from polarnode.offline.fidelity import Found, compared
from polarnode.offline.sft import SftLine

MOST: Final = 100  # lines that are rendered: 60 ms for each 100 KB, and the share is known long before
Render = Callable[[SftLine], "list[int]"]


@define(eq=False)
class Words:
    """What was compared: of `seen` lines, `counts` by what was found. `why` is why nothing could be compared, or what refused a line."""

    render: Render | None
    seen: int = 0
    counts: Counter[Found] = field(factory=Counter)
    why: str | None = None

    def compare(self, line: SftLine) -> None:
        """Render a line and count what came of it, as long as there are few."""
        if self.render is None or self.seen >= MOST:
            return
        self.seen += 1
        try:
            with boundary(ModelError, "it can not be rendered"):  # a template is a checkpoint's own code, and raises what it likes
                rendered = self.render(line)
        except ModelError as error:
            self.counts["refused"] += 1
            self.why = f"session {line.body['session_id']}: {error}"
            return
        self.counts[compared(line.token_ids, rendered).found] += 1

    def sentence(self) -> str | None:
        """For a person; None where nothing was compared."""
        if not self.seen:
            return self.why
        said = f"of {self.seen} conversations, the chat template renders {self.counts['equal']} to the very tokens the model had"
        return f"{said}, {self.counts['differs']} otherwise" + (
            f", and refuses {self.counts['refused']}: {self.why}" if self.counts["refused"] else ""
        )

    def json(self) -> dict[str, Json]:
        """As JSON."""
        return {"compared": self.seen, **{found: self.counts[found] for found in ("equal", "differs", "refused")}, "why": self.why}


def open_words(model: Path) -> Words:
    """Ready to compare with this checkpoint's template. It is loaded when the first line comes."""
    loaded: list[Any] = []

    def render(line: SftLine) -> list[int]:
        if not loaded:
            from transformers import AutoTokenizer

            loaded.append(AutoTokenizer.from_pretrained(str(model)))
        options = {} if line.thinking is None else {"enable_thinking": line.thinking}
        tools = line.body["tools"] or None
        found = loaded[0].apply_chat_template(line.body["messages"], tools=tools, tokenize=True, return_dict=False, **options)
        return list(found)

    return Words(render=render)
