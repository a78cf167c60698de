"""A checkpoint's language, loaded and audited: what the node needs to speak it faithfully, or a ModelError that says why it can not."""

import json
from pathlib import Path

from attrs import frozen

from polarnode.errors import ModelError, boundary
from polarnode.tokens.families import family_of
from polarnode.tokens.family import Family
from polarnode.tokens.template import Template
from polarnode.tokens.tokenizer import LoadedTokenizer, load_tokenizer


@frozen(kw_only=True)
class LoadedModel:
    """Tokenizer, family and template of one checkpoint; `notes` are what the audit found worth knowing. `name` is the folder's."""

    name: str
    path: Path
    tokenizer: LoadedTokenizer
    family: Family
    template: Template
    notes: tuple[str, ...]


def load_model(path: Path) -> LoadedModel:
    """Load from a checkpoint folder and audit its template. Takes seconds (transformers is imported): call it in a thread."""
    tokenizer = load_tokenizer(path, vocab_size=_embedding_size(path))
    family = family_of(tokenizer)
    template = Template(tokenizer, family)
    return LoadedModel(name=path.name, path=path, tokenizer=tokenizer, family=family, template=template, notes=template.audit())


def _embedding_size(path: Path) -> int | None:
    """Ids the model can sample: its embedding is often padded beyond what its tokenizer knows. None where the config does not say."""
    with boundary(ModelError, f"{path / 'config.json'} can not be read; name a folder with a Hugging Face checkpoint"):
        config = json.loads((path / "config.json").read_text())
    size = config.get("vocab_size")
    return size if isinstance(size, int) else None
