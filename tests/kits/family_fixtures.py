"""A folder for each model family: a small byte-level tokenizer with the family's real control strings, its
chat template, a config.

Templates are TRL's copies of the originals where it has one (a package the tests install), else short ones of
our own in `data/templates`, written after the documented format. `family_folder("glm4")` is a folder that
`load_model` takes. Whoever adds a family adds a line to FAMILIES.
"""

import json
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from attrs import frozen
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

OWN = Path(__file__).parents[1] / "data" / "templates"
_TEXT = """The quick brown fox looks at the files in /usr/local/bin and answers: "it is done". {"name": "look", "arguments": {"path": "a.txt"}}
def look(path: str) -> list[str]: return open(path).read().split("\\n")  # 1234567890
user assistant system model tool developer ai ipython commentary analysis final thought call response function functions value namespace
You are a helpful assistant. # Tools You have access to the following functions. <function=look> <parameter=a> </parameter> </function>
"""


@frozen(kw_only=True)
class FamilyFixture:
    """What makes a family: its template (a name in TRL, or `own`), its control strings, what its bos and eos
    are, and the row that takes it.
    """

    row: str
    template: str
    control: tuple[str, ...]
    eos: str
    bos: str | None = None
    own: bool = False


_QWEN = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
)
_QWEN_CALL = ("<tool_call>", "</tool_call>")
_QWEN3 = (*_QWEN, *_QWEN_CALL, "<tool_response>", "</tool_response>", "<think>", "</think>")
_NEMOTRON = (
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
_LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *(
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        "<|finetune_right_pad_id|>",
        "<|reserved_special_token_0|>",
    ),
)
_GLM = (
    *(
        "<|endoftext|>",
        "[MASK]",
        "[gMASK]",
        "[sMASK]",
        "<sop>",
        "<eop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
    ),
    *(
        "/nothink",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_HARMONY = (
    *(
        "<|startoftext|>",
        "<|endoftext|>",
        "<|return|>",
        "<|constrain|>",
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|call|>",
    ),
    *("<|refusal|>", "<|endofprompt|>"),
)
_DEEPSEEK = (
    *(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
        "<｜fim▁hole｜>",
        "<think>",
        "</think>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    *(
        "<|EOT|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ),
    *(
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
_KIMI = (
    *(
        "[BOS]",
        "[EOS]",
        "<|im_end|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "[EOT]",
        "<|im_system|>",
    ),
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    *("<|im_middle|>", "[UNK]", "[PAD]"),
)
_MINIMAX = (
    *(
        "]!p~[",
        "]~!b[",
        "]~b]",
        "[e~[",
        "]!d~[",
        "<fim_prefix>",
        "<fim_middle>",
        "<fim_suffix>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    ),
    *("<think>", "</think>"),
)
_GEMMA3 = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "[multimodal]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
)
_GEMMA4 = (
    *(
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "<|turn>",
        "<turn|>",
        "<|channel>",
        "<channel|>",
        "<|think|>",
        "<|tool>",
        "<tool|>",
    ),
    *(
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
        "<|image|>",
        "<|audio|>",
        "<|video|>",
    ),
)

FAMILIES = {
    "qwen2_5": FamilyFixture(
        row="qwen3", template="qwen2_5", control=(*_QWEN, *_QWEN_CALL), eos="<|im_end|>"
    ),
    "qwen3": FamilyFixture(row="qwen3", template="qwen3", control=_QWEN3, eos="<|im_end|>"),
    "qwen3_2507": FamilyFixture(
        row="qwen3", template="qwen3_instruct_2507", control=_QWEN3, eos="<|im_end|>"
    ),
    "qwen3_5": FamilyFixture(row="qwen3_xml", template="qwen3_5_think", control=_QWEN3, eos="<|im_end|>"),
    "qwen3_5_nothink": FamilyFixture(
        row="qwen3_xml", template="qwen3_5_nothink", control=_QWEN3, eos="<|im_end|>"
    ),
    "qwen3_6": FamilyFixture(row="qwen3_xml", template="qwen3_6", control=_QWEN3, eos="<|im_end|>"),
    "qwen3_coder": FamilyFixture(
        row="qwen3_xml", template="qwen3_coder", own=True, control=(*_QWEN, *_QWEN_CALL), eos="<|im_end|>"
    ),
    "llama3": FamilyFixture(
        row="llama3_plain", template="llama3", control=_LLAMA, bos="<|begin_of_text|>", eos="<|eot_id|>"
    ),
    "llama3_1": FamilyFixture(
        row="llama3", template="llama3_1", control=_LLAMA, bos="<|begin_of_text|>", eos="<|eot_id|>"
    ),
    "llama3_2": FamilyFixture(
        row="llama3", template="llama3_2", control=_LLAMA, bos="<|begin_of_text|>", eos="<|eot_id|>"
    ),
    "nemotron_3_nano": FamilyFixture(
        row="qwen3_xml", template="nemotron_3_nano", control=_NEMOTRON, bos="<s>", eos="<|im_end|>"
    ),
    "nemotron_3_super": FamilyFixture(
        row="qwen3_xml", template="nemotron_3_super", control=_NEMOTRON, bos="<s>", eos="<|im_end|>"
    ),
    "nemotron_3_ultra": FamilyFixture(
        row="qwen3_xml", template="nemotron_3_ultra", control=_NEMOTRON, bos="<s>", eos="<|im_end|>"
    ),
    "glm4": FamilyFixture(row="glm4", template="glm4moe", control=_GLM, eos="<|endoftext|>"),
    "glm5": FamilyFixture(row="glm4", template="glm5", own=True, control=_GLM, eos="<|endoftext|>"),
    "gptoss": FamilyFixture(
        row="gptoss", template="gptoss", control=_HARMONY, bos="<|startoftext|>", eos="<|return|>"
    ),
    "deepseek_v3": FamilyFixture(
        row="deepseek", template="deepseekv3", control=_DEEPSEEK, bos=_DEEPSEEK[0], eos=_DEEPSEEK[1]
    ),
    "deepseek_r1_distill": FamilyFixture(
        row="deepseek_r1_distill",
        template="deepseek_r1_distill",
        control=_DEEPSEEK,
        bos=_DEEPSEEK[0],
        eos=_DEEPSEEK[1],
    ),
    "deepseek_v3_1": FamilyFixture(
        row="deepseek_v3_1",
        template="deepseek_v3_1",
        own=True,
        control=_DEEPSEEK,
        bos=_DEEPSEEK[0],
        eos=_DEEPSEEK[1],
    ),
    "kimi_k2": FamilyFixture(
        row="kimi_k2", template="kimi_k2", own=True, control=_KIMI, bos="[BOS]", eos="[EOS]"
    ),
    "kimi_k2_5": FamilyFixture(
        row="kimi_k2",
        template="kimi_k2_5",
        own=True,
        control=(*_KIMI, "<think>", "</think>"),
        bos="[BOS]",
        eos="[EOS]",
    ),
    "minimax_m2": FamilyFixture(
        row="minimax_m2", template="minimax_m2", own=True, control=_MINIMAX, bos="]~!b[", eos="[e~["
    ),
    "gemma3": FamilyFixture(row="gemma3", template="gemma3", control=_GEMMA3, bos="<bos>", eos="<eos>"),
    "gemma4": FamilyFixture(row="gemma4", template="gemma4_v5", control=_GEMMA4, bos="<bos>", eos="<eos>"),
    "smollm2": FamilyFixture(
        row="chatml",
        template="smollm2",
        own=True,
        control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
    ),
}
_FOLDERS = TemporaryDirectory(prefix="polarnode-families-")


@pytest.fixture(params=FAMILIES)
def family_name(request: pytest.FixtureRequest) -> str:
    """Each family in turn."""
    return str(request.param)


@cache
def family_folder(name: str) -> Path:
    """A model folder of this family, made once a run."""
    folder = Path(_FOLDERS.name) / name
    write_family(folder, FAMILIES[name], template_text(name))
    return folder


def template_text(name: str) -> str:
    """A family's chat template."""
    family = FAMILIES[name]
    if family.own:
        return (OWN / f"{family.template}.jinja").read_text()
    return trl_template(family.template)


def trl_template(name: str) -> str:
    """TRL's copy of a vendor's template."""
    return Path(str(distribution("trl").locate_file(f"trl/chat_templates/{name}.jinja"))).read_text()


def write_family(folder: Path, family: FamilyFixture, template: str) -> None:
    """The folder's files, for a family's own template or a changed one."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_str(_vocabulary())
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in family.control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": family.eos} | ({"bos_token": family.bos} if family.bos else {})
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named})
    )
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size() + 3}))


@cache
def _vocabulary() -> str:
    """All 256 bytes and some merges, as a tokenizer's JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=letters, show_progress=False)  # type: ignore[no-untyped-call]
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    return str(tokenizer.to_str())
