"""A checkpoint's language, loaded and audited: what the node needs to speak it faithfully, or a ModelError that says why it can not."""

from pathlib import Path

from attrs import frozen

from polarnode.tokens.families import Family, family_of
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
    tokenizer = load_tokenizer(path)
    family = family_of(tokenizer)
    template = Template(tokenizer, family)
    return LoadedModel(name=path.name, path=path, tokenizer=tokenizer, family=family, template=template, notes=template.audit())
