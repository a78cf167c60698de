"""What `structure` takes, as JSON Schema (2020-12), so that the document of the API is made from the types
that read its bodies.

Keep it in step with `json.py`: a type that is read there has its schema here. What types cannot express
(ranges, names, one of two fields) is refused by the checks in `tasks.py`.
"""

import types
from collections.abc import Mapping
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import define, field

from polarnode.core.codec.json import json_key_of
from polarnode.core.conversation import Json

Schema = dict[str, Json]

_PLAIN: Final[Mapping[Any, Schema]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    Any: {},
    Json: {},
}


@define(eq=False)
class Schemas:
    """Collects the schemas of classes under their names, each once; `of` gives the schema of a type, which
    refers to them at `root`.

    `strict`: unknown fields are refused, as in bodies; else they may be there, as in answers, where fields
    are added as time goes by.
    """

    strict: bool
    root: str = "#/components/schemas/"
    suffix: str = ""  # of the names, where one class is both read strictly and answered
    known: Mapping[Any, Schema] = field(factory=dict)  # of types without a form of their own in JSON
    named: dict[str, Json] = field(factory=dict, init=False)
    _classes: dict[str, Any] = field(factory=dict, init=False)

    def of(self, kind: Any) -> Schema:
        """The schema of a type. TypeError for one that JSON has no shape for, and for a second class of one
        name.
        """
        if (found := self.known.get(kind, _PLAIN.get(kind))) is not None:
            return dict(found)
        if attrs.has(kind):
            return self._named(kind)
        return self._composed(kind, get_origin(kind), get_args(kind))

    def _composed(self, kind: Any, origin: Any, parts: tuple[Any, ...]) -> Schema:
        if origin is Literal:
            return {"enum": list(parts)}
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.of(part) for part in parts]}
        if origin is list or (origin is tuple and parts[1:] == (Ellipsis,)):
            return {"type": "array", "items": self.of(parts[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.of(parts[1])}
        raise TypeError(f"JSON has no shape for {kind}")

    def _named(self, cls: Any) -> Schema:
        name = cls.__name__ + self.suffix
        if self._classes.setdefault(name, cls) is not cls:
            raise TypeError(f"{cls} and {self._classes[name]} can not both be called {name}")
        if name not in self.named:
            self.named[name] = None  # a class that holds itself finds its name taken
            self.named[name] = self._object(cls)
        return {"$ref": self.root + name}

    def _object(self, cls: Any) -> Schema:
        hints = _hints(cls)
        whole = _object((cls.__doc__ or "").strip())
        for each in attrs.fields(cls):
            key = json_key_of(each)
            if not each.init or key is None:
                continue
            group, _, name = key.rpartition(".")
            found = whole["properties"].setdefault(group, _object()) if group else whole
            found["properties"][name] = self.of(hints[each.name]) | _default(each)
            if each.default is attrs.NOTHING and "optional" not in each.metadata:
                found["required"].append(name)
        return whole | ({"additionalProperties": False} if self.strict else {})


def _object(description: str = "") -> dict[str, Any]:
    described = {"description": description} if description else {}
    return {"type": "object", **described, "properties": {}, "required": []}


def _hints(cls: Any) -> Mapping[str, Any]:
    """Types by field; those written as text are resolved, the others left alone, because `Json` resolved is
    no longer `Json`.
    """
    written = {each.name: each.type for each in attrs.fields(cls)}
    return written | (get_type_hints(cls) if any(isinstance(kind, str) for kind in written.values()) else {})


def _default(each: "attrs.Attribute[Any]") -> Schema:
    """What a field is when it is absent; of containers and classes that is "empty", and their own fields
    hold the rest.
    """
    default = each.default
    if (
        default is attrs.NOTHING
        or default is None
        or not isinstance(default, bool | int | float | str | tuple)
    ):
        return {}
    return {"default": list(default) if isinstance(default, tuple) else default}
