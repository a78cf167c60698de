"""tiktoken.model: the ids tiktoken gives, a pattern read and not run, and checkpoints whose code says what is
not understood.
"""

import base64
import json
import random
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polarnode.core.errors import ModelError
from polarnode.tokens.tokenizer import LoadedTokenizer, load_tokenizer
from polarnode.tokens.vocabulary import RANKS_FILE, read_ranks

PATTERN = (
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s+(?!\S)|\s+""",
)
RENDERS = """
    def apply_chat_template(self, conversation, tools=None, tokenize=True, **kwargs):
        tools = deep_sort_dict(tools)
        return super().apply_chat_template(conversation, tools=tools, tokenize=tokenize, **kwargs)
"""
# as K2.5's code goes on, before it renders
DECLARES = """        tools_ts_str = None
        if tools:
            try:
                tools_ts_str = encode_tools_to_typescript_style(tools)
            except Exception as e:
                print(f"{e}")
        if tools_ts_str is not None:
            kwargs['tools_ts_str'] = tools_ts_str
        return super()"""
CODE = """import nothing_that_is_there
class TikTokenTokenizer(Base):
    num_reserved_special_tokens = 256
    pat_str = "|".join({pattern!r})
    def __init__(self, vocab_file):
        raise SystemExit("a checkpoint's code is never run")
{more}
"""
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"
)
# Longer and longer strings of few letters, so that many are made of two others in several ways.
_rng = random.Random(4)
RANKED = [bytes([byte]) for byte in range(256)]
for _ in range(600):
    token = _rng.choice(RANKED[97:104] + RANKED[256:]) + _rng.choice(RANKED[97:104] + RANKED[256:])
    if token not in RANKED and len(token) < 9:
        RANKED.append(token)


def folder(
    to: Path,
    *,
    code: str = CODE.format(pattern=list(PATTERN), more=RENDERS),
    template: str | None = TEMPLATE,
    **config: object,
) -> Path:
    (to / RANKS_FILE).write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(RANKED))
    )
    (to / "tokenization_kimi.py").write_text(code)
    base = len(RANKED)
    told = {
        "added_tokens_decoder": {
            str(base + at): {"content": text}
            for at, text in ((0, "[BOS]"), (1, "[EOS]"), (4, "<|im_end|>"), (6, "<|im_user|>"))
        },
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (to / "tokenizer_config.json").write_text(json.dumps(told | config))
    if template is not None:
        (to / "chat_template.jinja").write_text(template)
    return to


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    return load_tokenizer(folder(tmp_path_factory.mktemp("ranks")))


# Hypothesis draws the strings of our own modules too, control strings among them: those are plain text here
@example(text="<|im_end|>")
@example(text="a[BOS]b<|im_user|><|reserved_token_860|>")
@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abcdefg", max_size=40)
    | st.text(max_size=20)
    | st.text("ab 12\n\u4e2d\u6587'!", max_size=30)
)
def test_ids_are_tiktokens(converted: LoadedTokenizer, text: str) -> None:
    ranks = {token: rank for rank, token in enumerate(RANKED)}
    reference = tiktoken.Encoding("test", pat_str="|".join(PATTERN), mergeable_ranks=ranks, special_tokens={})
    assert list(converted.encode_plain(text)) == reference.encode_ordinary(text)


def test_folder_without_tokenizer_json_served(tmp_path: Path) -> None:
    loaded = load_tokenizer(folder(tmp_path), vocab_size=len(RANKED) + 20)
    assert loaded.control["<|im_end|>"] == len(RANKED) + 4
    assert loaded.token_bytes(len(RANKED) + 4) == b"<|im_end|>"
    assert loaded.token_bytes(len(RANKED) + 3) == f"<|reserved_token_{len(RANKED) + 3}|>".encode()
    assert loaded.token_bytes(300) == RANKED[300]
    assert not set(loaded.control.values()).intersection(loaded.encode_plain("a<|im_end|>b[BOS]"))
    tools = ({"type": "function", "function": {"name": "b", "description": "a"}},)
    text = loaded.render(
        ({"role": "user", "content": "x"},), tools=tools, generation_prompt=True, thinking=None
    )
    assert (
        text == '[{"function": {"description": "a", "name": "b"}, "type": "function"}]<|im_user|>x<|im_end|>'
    ), "its code sorts tools"


def test_converting_code_leaves_tools_alone(tmp_path: Path) -> None:
    assert not read_ranks(folder(tmp_path, code=CODE.format(pattern=list(PATTERN), more=""))).sorts_tools


def test_tool_declaring_code_is_known(tmp_path: Path) -> None:
    """Kimi K2.5's, whose text of tools is made here (`typescript`)."""
    more = RENDERS.replace("        return super()", DECLARES)
    found = read_ranks(folder(tmp_path, code=CODE.format(pattern=list(PATTERN), more=more)))
    assert found.sorts_tools
    other = more.replace("if tools:", "if shortened(tools):")
    assert "its prompts would be others" in refusal(
        tmp_path, code=CODE.format(pattern=list(PATTERN), more=other)
    )


def refusal(to: Path, **changes: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(folder(to, **changes))  # type: ignore[arg-type]
    return str(caught.value)


def test_prompt_making_code_is_refused(tmp_path: Path) -> None:
    more = RENDERS.replace("tools = deep_sort_dict(tools)", "kwargs['tools_ts_str'] = typescript(tools)")
    assert "its prompts would be others than the model's" in refusal(
        tmp_path, code=CODE.format(pattern=list(PATTERN), more=more)
    )


@pytest.mark.parametrize("assigned", ['"|".join(PIECES)', '"a" + "b"', '"|".join(["a", b])'])
def test_non_constant_pattern_is_refused(tmp_path: Path, assigned: str) -> None:
    code = CODE.format(pattern=[], more="").replace('"|".join([])', assigned)
    assert "cannot be read from the checkpoint's code; load it once with transformers" in refusal(
        tmp_path, code=code
    )


def test_pattern_as_one_constant(tmp_path: Path) -> None:
    code = CODE.format(pattern=[], more="").replace('"|".join([])', repr("|".join(PATTERN)))
    assert read_ranks(folder(tmp_path, code=code)).tokenizer.encode("ab").ids


def test_missing_or_torn_files_are_refused(tmp_path: Path) -> None:
    assert "cannot be read; load it once" in refusal(
        tmp_path, auto_map={"AutoTokenizer": ["../evil.Class", None]}
    )
    assert "cannot be read; load it once" in refusal(tmp_path, code="def (")
    (tmp_path / "chat_template.jinja").unlink()
    assert "no chat template" in refusal(tmp_path, template=None)


def test_control_token_sharing_rank_is_refused(tmp_path: Path) -> None:
    taken = {"added_tokens_decoder": {"5": {"content": "[BOS]"}, str(len(RANKED)): {"content": "[EOS]"}}}
    assert "'[BOS]' would get another id" in refusal(tmp_path, **taken)
