"""The JSON Schema (2020-12) of what `structure` accepts, so that the API's document is generated from the
types that read its bodies.

Keep it in step with `json.py`: each type that is read there has its schema here. What types cannot express
(ranges, names, one of two fields) is checked by the rules in `tasks.py`.
"""

import types
from collections.abc import Mapping
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import define, field

from polarnode.core.codec.json import json_key_of, shorthand_of
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
class SchemaCollector:
    """Collects each class's schema once, under the class's name. `of` returns the schema of a type, with
    references to `root`.

    `strict`: unknown fields are refused, as in request bodies; otherwise they are allowed, as in answers,
    where fields are added over time.
    """

    strict: bool
    root: str = "#/components/schemas/"
    suffix: str = ""  # It ends the names where one class is both read strictly and returned in answers.
    known: Mapping[Any, Schema] = field(factory=dict)  # schemas of types that have no JSON form of their own
    named: dict[str, Json] = field(factory=dict, init=False)
    _classes: dict[str, Any] = field(factory=dict, init=False)

    def of(self, kind: Any) -> Schema:
        """The schema of a type. Raises TypeError for a type without a JSON form, and for a second class of
        the same name.
        """
        if (found := self.known.get(kind, _PLAIN.get(kind))) is not None:
            return dict(found)
        if attrs.has(kind):
            whole, short = self._named(kind), shorthand_of(kind)
            return {"anyOf": [self.of(_hints(kind)[short[0]]), whole]} if self.suffix and short else whole
        return self._composed_schema(kind, get_origin(kind), get_args(kind))

    def _composed_schema(self, kind: Any, origin: Any, parts: tuple[Any, ...]) -> Schema:
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
            raise TypeError(f"{cls} and {self._classes[name]} cannot both be called {name}")
        if name not in self.named:
            self.named[name] = None  # so that a class that contains itself finds its name taken
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
    """Types by field. Types written as text are resolved; others are left alone, because a resolved `Json` is
    no longer `Json`.
    """
    written = {each.name: each.type for each in attrs.fields(cls)}
    return written | (get_type_hints(cls) if any(isinstance(kind, str) for kind in written.values()) else {})


def _default(each: "attrs.Attribute[Any]") -> Schema:
    """The value of an absent field. For containers and classes it is "empty", because their own fields hold
    the rest.
    """
    default = each.default
    if (
        default is attrs.NOTHING
        or default is None
        or not isinstance(default, bool | int | float | str | tuple)
    ):
        return {}
    return {"default": list(default) if isinstance(default, tuple) else default}
