"""Where JSON becomes values (cattrs), and a refusal becomes a sentence with a path. Only this room and the providers' shapes know JSON."""

from polarnode.wire.core import dump_json, read_json, structure

__all__ = ["dump_json", "read_json", "structure"]
