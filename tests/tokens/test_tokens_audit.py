"""The audit passes what can be extended faithfully, and refuses what would be silently wrong."""

from pathlib import Path

import pytest
import tokens_kit as kit

from polarnode.core.errors import ModelError
from polarnode.tokens.audit import Limits, audit
from polarnode.tokens.rendering import TemplateRenderer
from polarnode.tokens.template import Template
from polarnode.tokens.tokenizer import load_tokenizer

RESULT = "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
USER = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"


def audited(to: Path, before: str, after: str) -> tuple[str, ...]:
    tokenizer = load_tokenizer(kit.variant(to, template=lambda text: text.replace(before, after)))
    renderer = TemplateRenderer(tokenizer, kit.model().family)
    return audit(renderer, Limits.of(renderer))


def test_tiny_model_has_no_notes() -> None:
    assert kit.model().template.audit() == ()


def test_qwen3_passes_noting_dropped_thinking(qwen3_folder: Path) -> None:
    (note,) = kit.model(qwen3_folder).template.audit()
    assert "leaves out earlier thinking" in note


def test_template_opening_thought_passes(tmp_path: Path) -> None:
    before = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking"
    assert audited(tmp_path, before, before.replace("assistant\\n'", "assistant\\n<think>\\n'")) == ()


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param(
            RESULT,
            RESULT.replace("message.content", "(loop.index ~ message.content)"),
            "tool",
            id="results are numbered",
        ),
        pytest.param(
            RESULT,
            RESULT.replace("message.content", "((tools or []) | length ~ message.content)"),
            "tool",
            id="results know the tools",
        ),
        pytest.param(
            USER,
            USER.replace("message.content", "(messages[0].content ~ message.content)"),
            "user",
            id="the system is repeated",
        ),
        pytest.param(
            "{%- if add_generation_prompt %}",
            "{%- if add_generation_prompt %}{{- '\\n' if messages[0].role == 'system' else '' }}",
            "tool",
            id="the prompt knows the head",
        ),
    ],
)
def test_template_looking_back_is_refused(tmp_path: Path, before: str, after: str, kind: str) -> None:
    with pytest.raises(
        ModelError,
        match=rf"writes [a-z ]*{kind} message\(s\) after an answer as .* depending on what came before",
    ):
        audited(tmp_path, before, after)


def test_role_refused_by_template_is_noted(tmp_path: Path) -> None:
    late = "{%- if message.role == 'system' %}{{- raise_exception('system first') }}{%- endif %}"
    notes = audited(tmp_path, USER, f"{{%- if not loop.first %}}{late}{{%- endif %}}{USER}")
    assert any(
        "system message behind the head" in note and "the model sees a user's message there" in note
        for note in notes
    )


def test_late_system_becomes_user_message(tmp_path: Path) -> None:
    """Where a template leaves a late system message out, the model sees a user's message."""
    notes = audited(
        tmp_path, USER, "{%- if message.role == 'user' or loop.index < 3 %}" + USER + "{%- endif %}"
    )
    assert any(
        "system message behind the head" in note and "the model sees a user's message there" in note
        for note in notes
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("{{- tool | tojson }}", "{{- tool | tojson(ensure_ascii=true) }}", id="escapes"),
        pytest.param(
            USER, USER.replace("message.content", "message.content | replace('q', 'k')"), id="changes"
        ),
        pytest.param("{{- messages[0].content + '\\n\\n' }}", "", id="drops the system"),
    ],
)
def test_template_changing_text_is_refused(tmp_path: Path, before: str, after: str) -> None:
    with pytest.raises(ModelError, match="it is not served"):
        audited(tmp_path, before, after)


def test_template_runs_the_audit(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        kit.variant(
            tmp_path,
            template=lambda text: text.replace(
                RESULT, RESULT.replace("message.content", "(loop.index ~ message.content)")
            ),
        )
    )
    with pytest.raises(ModelError, match="depending on what came before"):
        Template(tokenizer, kit.model().family).audit()
