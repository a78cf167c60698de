"""Responses: how a history becomes one item. The model is asked for a summary, which travels sealed and comes back as a user's message.

The rule for whoever edits it: `_INTRODUCTION` begins with the words by which `merge.roles` knows a history that was compacted, and both
sentences stay as they are while sessions live, because they are part of prompts.
"""

from typing import Final

# Asked as the last message of the whole conversation, so that the prompt extends the one before it and the engine's cache holds it.
INSTRUCTION: Final = (
    "Stop here and summarize this conversation, so that another model can go on without having seen it. Do not call any tools. Write plain "
    "text with: the task and every instruction of the user that still holds; what was done and found, with exact names, paths, commands and "
    "values; what failed and why; the state things are in now; and what has to be done next. Leave out nothing that is needed to finish."
)

_INTRODUCTION: Final = (
    "Another language model started to solve this problem and wrote the summary below. What was said before it is no longer shown. Build on "
    "what was done, and do not do it again."
)


def retold(summary: str) -> str:
    """The message that stands for the history that was summarized. A model that called a tool instead wrote nothing, and that is said."""
    return f"{_INTRODUCTION}\n\n{summary if summary.strip() else '(It wrote nothing.)'}"
