"""The cases of the live matrix: which harness speaks which dialect, and what the steered engine says in it.

Rule for whoever edits it: a case tells the truth of its harness. What one can not do (no write tool, a call
beside the conversation, a history it rewrites) is said in the case, with `why`, and appears in the table of
docs/harnesses.md; nothing is left out to make a case pass.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve, frozen

from polarnode.harnesses import HARNESSES
from polarnode.harnesses.harness import Harness

SHELL_FILE, WRITTEN_FILE = "shell.txt", "written.txt"
SHELL_TEXT = "a word from the shell\n"
# what JSON, shells and dialects are wont to spoil
WRITTEN_TEXT = 'first line\n  "quoted" and \\escaped\\ – ümläut\n'
DONE = "Both files are written."


@frozen
class Call:
    """A call of one of the harness's own tools."""

    name: str
    arguments: Mapping[str, Any]


@frozen
class Step:
    """One turn of the script: an optional thought, text, calls. `free`: the policy says what it will, from
    here on.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    thought: str = ""
    free: bool = False


@frozen(kw_only=True)
class Case:
    """One harness in one dialect. `provider` is what its turns must say; `beside` how many calls it makes
    beside its conversation.
    """

    name: str
    harness: Mapping[str, Any]
    provider: str
    steps: tuple[Step, ...]
    in_ci: bool = False
    beside: int = 0
    lineages: int = 1
    # it asks for one call an answer: then the node ends each sample with it, before the turn's own end
    one_call: bool = False
    written: str = WRITTEN_TEXT  # what its second file holds at the end
    why: str = ""  # of whatever is not as the others: shown in the table

    @property
    def by_text(self) -> bool:
        """Whether its turns hold no call that the model's family knows."""
        return not any(step.calls for step in self.steps)

    @property
    def shell_tool(self) -> str | None:
        """The tool by which the main conversation is known: its calls beside have other tools, or none. None:
        every call is of it.
        """
        return self.steps[0].calls[0].name if self.steps[0].calls else None

    def task(self) -> dict[str, Any]:
        """The task as JSON. The files are judged in the runtime, before it is removed."""
        return {
            "instruction": (
                f"Write a word to {SHELL_FILE} with the shell, then write {WRITTEN_FILE}, then say so. This"
                f" is case {self.name}."
            ),
            "harness": dict(self.harness),
            "evaluator": {
                "name": "command",
                "config": {"argv": ["python3", "-c", CHECK, self.written], "reward_file": VERDICT},
            },
            "budgets": {"run_s": RUN_S, "max_turns": 12},
            "sampling": {"temperature": 1.0},
            "metadata": {"case": self.name},
        }


RUN_S = 420.0  # seconds: the slowest starts in 25 on a quiet machine, and took 160 on one that was busy


VERDICT = "/tmp/verdict.json"
CHECK = f"""
import json, sys
def found(name):
    try:
        return open("/work/" + name, encoding="utf-8", newline="").read()
    except (OSError, UnicodeError) as error:
        return repr(error)
shell, written = found({SHELL_FILE!r}), found({WRITTEN_FILE!r})
verdict = {{"shell": shell == {SHELL_TEXT!r}, "write": written == sys.argv[1], "found": [shell[:200], written[:200]]}}
json.dump({{"reward": int(verdict["shell"] and verdict["write"]), **verdict}}, open({VERDICT!r}, "w"))
"""

SHELL_LINE = f"printf 'a word from the shell\\n' | tee {SHELL_FILE}"
WRITE_LINE = f"cat > {WRITTEN_FILE} <<'END'\n{WRITTEN_TEXT}END"
COMPLETE_LINE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMPLETE = Step("", (Call("bash", {"command": COMPLETE_LINE}),))
WRITTEN_PATH = f"/work/{WRITTEN_FILE}"
_PATCHED = "".join(f"+{line}\n" for line in WRITTEN_TEXT.splitlines())
PATCH = f"*** Begin Patch\n*** Add File: {WRITTEN_FILE}\n{_PATCHED}*** End Patch\n"


def script(shell: Call, write: Call, end: Step | None = None) -> tuple[Step, ...]:
    """The three turns: a word and a shell call, a file write, the end."""
    return (
        Step("I begin with the shell.", (shell,)),
        Step("Now the other file.", (write,)),
        end or Step(DONE),
    )


def _function(name: str, **parameters: str) -> str:
    """A call as OpenHands has it in text."""
    lines = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<function={name}>\n{''.join(lines)}</function>"


# What each harness calls its tools, and how its run ends.
SCRIPTS: Mapping[str, tuple[Step, ...]] = {
    "pi": script(
        Call("bash", {"command": SHELL_LINE}), Call("write", {"path": WRITTEN_PATH, "content": WRITTEN_TEXT})
    ),
    "mini_swe_agent": script(
        Call("bash", {"command": SHELL_LINE}), Call("bash", {"command": WRITE_LINE}), COMPLETE
    ),
    "claude_code": script(
        Call("Bash", {"command": SHELL_LINE, "description": "Write a word"}),
        Call("Write", {"file_path": WRITTEN_PATH, "content": WRITTEN_TEXT}),
    ),
    "codex": script(Call("exec_command", {"cmd": SHELL_LINE}), Call("exec_command", {"cmd": WRITE_LINE})),
    "qwen_code": script(
        Call(
            "run_shell_command",
            {"command": SHELL_LINE, "is_background": False, "description": "Write a word"},
        ),
        Call("write_file", {"file_path": WRITTEN_PATH, "content": WRITTEN_TEXT}),
    ),
    "gemini_cli": script(
        Call("run_shell_command", {"command": SHELL_LINE}),
        Call("write_file", {"file_path": WRITTEN_PATH, "content": WRITTEN_TEXT}),
    ),
    "opencode": script(
        Call("bash", {"command": SHELL_LINE, "description": "Write a word"}),
        Call("write", {"filePath": WRITTEN_PATH, "content": WRITTEN_TEXT}),
    ),
    "openclaw": script(
        Call("exec", {"command": SHELL_LINE}), Call("write", {"path": WRITTEN_PATH, "content": WRITTEN_TEXT})
    ),
    "hermes": script(
        Call("terminal", {"command": SHELL_LINE}),
        Call("write_file", {"path": WRITTEN_PATH, "content": WRITTEN_TEXT}),
    ),
    "openhands_sdk": script(
        Call("terminal", {"command": SHELL_LINE}),
        Call("file_editor", {"command": "create", "path": WRITTEN_PATH, "file_text": WRITTEN_TEXT}),
        Step("", (Call("finish", {"message": DONE}),)),
    ),
}

# Where an API leaves a harness without tools: calls are text, as its own prompt wants them.
FENCE = "```mswea_bash_command\n{}\n```"
TEXT_SCRIPTS: Mapping[str, tuple[Step, ...]] = {
    "mini_swe_agent.text": tuple(
        Step(f"I go on.\n\n{FENCE.format(line)}") for line in (SHELL_LINE, WRITE_LINE, COMPLETE_LINE)
    ),
    "openhands_sdk.text": (
        Step(f"I begin with the shell.\n{_function('terminal', command=SHELL_LINE)}"),
        Step(
            "Now the other"
            f" file.\n{_function('file_editor', command='create', path=WRITTEN_PATH, file_text=WRITTEN_TEXT)}"
        ),
        Step(_function("finish", message=DONE)),
    ),
}

# What the harnesses call the APIs, and what we do.
PROVIDERS: Mapping[str, str] = {
    "chat": "openai_chat",
    "openai": "openai_chat",
    "openai-completions": "openai_chat",
    "responses": "openai_responses",
    "openai-responses": "openai_responses",
    "anthropic": "anthropic",
    "anthropic-messages": "anthropic",
    "google": "google",
    "gemini": "google",
    "vertex": "google",
    "google-generative-ai": "google",
    "text": "openai_chat",
    "chat_completions": "openai_chat",
    "codex_responses": "openai_responses",
    "anthropic_messages": "anthropic",
}


# in their default APIs: each of the four is among them
IN_CI = ("pi", "mini_swe_agent", "claude_code", "codex", "gemini_cli", "qwen_code")


def plain(harness: Harness) -> Iterator[Case]:
    """A harness in each of its APIs, with nothing else set."""
    for place, api in enumerate(harness.apis):
        name = f"{harness.name}.{api}"
        case = Case(
            name=name,
            harness={"name": harness.name, "settings": {"api": api} if place else {}},
            provider=PROVIDERS[api],
            steps=TEXT_SCRIPTS.get(name) or SCRIPTS[harness.name],
            in_ci=not place and harness.name in IN_CI,
        )
        yield evolve(case, **DIFFERENT.get(name, {}))


def holds_thinking(case: Case) -> Case:
    """The same with a thought before each turn's words: what a harness does with reasoning must cost no
    lineage.
    """
    steps = tuple(
        evolve(step, thought=f"Step {number} of {len(case.steps)}: as it is asked.")
        for number, step in enumerate(case.steps, 1)
    )
    return evolve(
        case,
        name=f"{case.name}.thinking",
        steps=steps,
        in_ci=False,
        why="; ".join(filter(None, ("a thought before each turn", case.why))),
    )


_CODEX_PATCHES = script(Call("exec_command", {"cmd": SHELL_LINE}), Call("apply_patch", {"input": PATCH}))


def _program(command: str) -> str:
    """A program for Codex's code mode."""
    return f"const done = await tools.exec_command({{cmd: {json.dumps(command)}}});\ntext(done.output);\n"


SPECIAL: tuple[Case, ...] = (
    Case(
        name="codex.responses.gpt-5.5",
        harness={"name": "codex", "model_name": "gpt-5.5"},
        provider="openai_responses",
        steps=_CODEX_PATCHES,
        why="a model name it knows: the file is written with its freeform apply_patch",
    ),
    Case(
        name="codex.responses.gpt-6-sol",
        harness={"name": "codex", "model_name": "gpt-6-sol"},
        provider="openai_responses",
        steps=script(
            Call("exec", {"input": _program(SHELL_LINE)}), Call("exec", {"input": _program(WRITE_LINE)})
        ),
        one_call=True,
        why=(
            "a model name it knows: its one tool takes programs, and comes among the messages; one call an"
            " answer"
        ),
    ),
    Case(
        name="claude_code.anthropic.bare",
        harness={"name": "claude_code", "settings": {"bare": True}},
        provider="anthropic",
        steps=script(Call("Bash", {"command": SHELL_LINE}), Call("Bash", {"command": WRITE_LINE})),
        why="three tools, and the file is written with the shell",
    ),
    Case(
        name="claude_code.anthropic.search",
        harness={"name": "claude_code"},
        provider="anthropic",
        steps=(
            Step(
                "I look for a tool.",
                (Call("ToolSearch", {"query": "select:TaskCreate,NotebookEdit", "max_results": 5}),),
            ),
            *SCRIPTS["claude_code"],
        ),
        why="it looks for further tools first: they come in the middle of the conversation",
    ),
)

# How a case is not as the others.
DIFFERENT: Mapping[str, Mapping[str, Any]] = {
    "openhands_sdk.text": {
        "lineages": 3,
        "written": WRITTEN_TEXT.rstrip("\n"),
        "why": (
            "its text protocol strips parameters, and spells each call anew: every turn is a history of"
            " its own"
        ),
    },
}

PLAIN = tuple(case for name, harness in HARNESSES.items() if name in SCRIPTS for case in plain(harness))
CASES: tuple[Case, ...] = (*PLAIN, *SPECIAL, *map(holds_thinking, PLAIN))

# Not of the matrix: an answer long enough to leave in the middle of, for whoever speaks any API.
LONG = Case(
    name="a.long.answer",
    harness={"name": "shell"},
    provider="",
    steps=(Step(" ".join(f"word {number}," for number in range(120))),),
)

# ── a harness that starts another agent of its own ───────────────────────────

HELPED_FILE = "helped.txt"
HELPER_LINE = f"printf 'a word from a helper\\n' > {HELPED_FILE}"
# for those whose helpers work beside them: seen to be done, and told
WAIT_LINE = f"until [ -e {HELPED_FILE} ]; do sleep 0.2; done; sleep 3"


@frozen(kw_only=True)
class Helped:
    """A harness whose main agent hands a task to a helper. The helper's own prompt names the case `helper`,
    and nothing of the main one's.
    """

    harness: str
    ask: Call
    shell: Call  # the helper's
    wait: Call | None = None  # the main agent's, where the helper works in the background
    end: Step = Step("It is written.")
    in_ci: bool = False

    @property
    def main(self) -> Case:
        waits = () if self.wait is None else (Step("I wait.", (self.wait,)),)
        steps = (Step("I ask a helper.", (self.ask,)), *waits, Step(DONE))
        return Case(name=f"{self.harness}.asks", harness={"name": self.harness}, provider="", steps=steps)

    @property
    def helper(self) -> Case:
        return Case(
            name=f"{self.harness}.helper",
            harness={"name": self.harness},
            provider="",
            steps=(Step("I write.", (self.shell,)), self.end),
        )


def _task(harness: str) -> str:
    return f"Write a word to {HELPED_FILE} with the shell. This is case {harness}.helper."


HELPED: tuple[Helped, ...] = (
    Helped(
        harness="claude_code",
        ask=Call(
            "Agent",
            {
                "description": "Write a word",
                "prompt": _task("claude_code"),
                "subagent_type": "general-purpose",
            },
        ),
        shell=Call("Bash", {"command": HELPER_LINE, "description": "Write a word"}),
        wait=Call("Bash", {"command": WAIT_LINE, "description": "Wait for the helper"}),
        in_ci=True,
    ),
    Helped(
        harness="codex",
        ask=Call("multi_agent_v1.spawn_agent", {"message": _task("codex")}),
        shell=Call("exec_command", {"cmd": HELPER_LINE}),
        wait=Call("exec_command", {"cmd": WAIT_LINE, "yield_time_ms": 30000}),
        in_ci=True,
    ),
    Helped(
        harness="qwen_code",
        ask=Call(
            "agent",
            {"description": "Write a word", "prompt": _task("qwen_code"), "subagent_type": "general-purpose"},
        ),
        shell=Call(
            "run_shell_command",
            {"command": HELPER_LINE, "is_background": False, "description": "Write a word"},
        ),
        wait=Call(
            "run_shell_command",
            {"command": WAIT_LINE, "is_background": False, "description": "Wait for the helper"},
        ),
    ),
    Helped(
        harness="gemini_cli",
        ask=Call("invoke_agent", {"agent_name": "generalist", "prompt": _task("gemini_cli")}),
        shell=Call("run_shell_command", {"command": HELPER_LINE}),
        end=Step("", (Call("complete_task", {"result": {"response": "It is written."}}),)),
    ),
    Helped(
        harness="opencode",
        ask=Call(
            "task", {"description": "Write a word", "prompt": _task("opencode"), "subagent_type": "general"}
        ),
        shell=Call("bash", {"command": HELPER_LINE, "description": "Write a word"}),
    ),
    Helped(
        harness="hermes",
        ask=Call("delegate_task", {"goal": _task("hermes"), "context": "The folder is /work."}),
        shell=Call("terminal", {"command": HELPER_LINE}),
    ),
)

# ── a script that leads a harness into its work, and lets go ──────────────────

FREE = Step(free=True)
LED: tuple[Case, ...] = tuple(
    evolve(
        case,
        name=f"{case.name}.led",
        steps=(*case.steps[:2], FREE),
        in_ci=case.harness["name"] in ("claude_code", "codex", "qwen_code"),
    )
    for case in PLAIN
    if not case.harness.get("settings")
)

EXTRA: tuple[Case, ...] = (LONG, *LED, *(case for helped in HELPED for case in (helped.main, helped.helper)))
