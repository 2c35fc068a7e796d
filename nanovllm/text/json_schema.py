"""Changes a JSON schema so that objects cannot have undeclared keys."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product
from typing import Any
from urllib.parse import unquote

PROPERTY_KEYWORDS = ("properties", "patternProperties")  # their values map names to schemas
BRANCH_KEYWORDS = ("anyOf", "oneOf")
# Keywords whose value is a schema, or a list of schemas, of an object's or array's children.
CHILD_KEYWORDS = ("additionalProperties", "items", "prefixItems", "additionalItems")
# Keywords that references need. The result has its own "$defs" and does not need the others.
DEFINITION_KEYWORDS = ("$defs", "definitions", "$id", "$anchor")
ROOT_KEYWORDS = ("$schema", "x-guidance")  # llguidance reads them only at the root

# The limit of the work for one schema: a visit of a schema, or of a combination of schemas, counts
# as one. MAX_VISITS take about a quarter of a second.
MAX_VISITS = 50_000
CHARS_PER_VISIT = 1000  # copying 1000 characters of names, enums etc. takes as long as a visit
PROPERTIES_PER_VISIT = 16  # copying 16 properties takes as long as a visit


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Forbids undeclared keys where a schema has ``properties`` or ``patternProperties`` and no
    ``additionalProperties``, at any depth.

    Keys may also be declared in ``$ref``, in ``allOf``, or in the matching branch of ``anyOf`` or
    ``oneOf``. ``"unevaluatedProperties": false`` would have this effect, but llguidance does not
    support that keyword. So the result lists all keys that are declared for an object in one place,
    with ``"additionalProperties": false`` beside them.

    Returns:
        A new schema, whose references point to its own ``$defs``.

    Raises:
        ValueError: the target of a reference does not exist or is in another document, or there
            are too many paths through references and branches.
    """
    closer = _Closer(schema)
    try:
        closed = closer.close(schema)
    except RecursionError:
        raise ValueError("the schema's references are nested too deeply") from None
    root = {keyword: schema[keyword] for keyword in ROOT_KEYWORDS if keyword in schema}
    return {**root, **closed, **({"$defs": closer.definitions} if closer.definitions else {})}


class _Closer:
    """Closes the objects of one schema: forbids undeclared keys.

    ``$ref``, ``allOf``, ``anyOf`` and ``oneOf`` (in-place applicators, in JSON Schema's terms) hold
    schemas for the same value as the schema around them. If several schemas of a value declare
    keys, the result is an ``anyOf`` of combinations. A combination has one branch of each ``anyOf``
    and ``oneOf``, and allows the keys that any of its schemas declares.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        self._root = root
        self._names: dict[str, str] = {}  # names of definitions, by reference
        self._num_visits = 0

    def close(self, *schemas: Any) -> Any:
        """Returns a schema that allows what all of a value's schemas allow, except for objects with
        undeclared keys."""
        if len(schemas) == 1:
            (schema,) = schemas
            if not isinstance(schema, Mapping):
                return schema
            num_declaring = sum(map(self._declares, self._applicators_of(schema)))
            if num_declaring + _has_keys(schema) <= 1:
                return self._close_combination([schema])
        combinations = self._combine([self._alternatives(schema) for schema in schemas])
        return {"anyOf": [self._close_combination(combination) for combination in combinations]}

    def _close_combination(self, schemas: list[Any]) -> dict[str, Any]:
        """Returns a schema that allows what all of ``schemas`` allow, except for objects with
        undeclared keys.

        Args:
            schemas: a combination from ``_alternatives``; or a single schema whose keys are
                declared in one place, in the schema itself or in one of its applicators.
        """
        copies = [self._copy(schema) for schema in schemas]
        objects = [schema for schema in schemas if isinstance(schema, Mapping)]
        properties: dict[str, list[Any]] = {}
        for schema in objects:
            for name, value in _declared_properties(schema).items():
                properties.setdefault(name, []).append(value)
        self._count_visits(len(properties) // PROPERTIES_PER_VISIT)
        closing: dict[str, Any] = {}
        if properties:
            closing["properties"] = {k: self.close(*values) for k, values in properties.items()}
        keywords = set(chain.from_iterable(objects))
        if "additionalProperties" not in keywords and not keywords.isdisjoint(PROPERTY_KEYWORDS):
            closing["additionalProperties"] = False
        if len(schemas) == 1:
            return {**copies[0], **closing}
        for schema in objects:
            for pattern in _mapping(schema.get("patternProperties")):
                closing.setdefault("patternProperties", {})[pattern] = True
        return {"allOf": [*copies, closing]}

    def _copy(self, schema: Any) -> Any:
        """Returns a copy of a schema with its inner schemas closed. In ``properties``, each schema
        is replaced by True: ``_close_combination`` adds the closed ones."""
        self._count_visits(1)
        if not isinstance(schema, Mapping):
            return schema
        new: dict[str, Any] = {}
        for keyword, content in schema.items():
            if keyword in PROPERTY_KEYWORDS:
                self._count_characters([*_mapping(content)])
            if keyword == "properties":
                new[keyword] = dict.fromkeys(content, True) if _mapping(content) else content
            elif keyword == "patternProperties" and isinstance(content, Mapping):
                new[keyword] = {pattern: self.close(value) for pattern, value in content.items()}
            elif keyword == "$ref" and isinstance(content, str):
                new[keyword] = self._define(content)
            elif keyword in ("allOf", *BRANCH_KEYWORDS, *CHILD_KEYWORDS):
                is_list = isinstance(content, list)
                new[keyword] = [*map(self.close, content)] if is_list else self.close(content)
            elif keyword not in DEFINITION_KEYWORDS:
                self._count_characters(content)
                new[keyword] = content
        return new

    def _define(self, reference: str) -> str:
        """Stores the closed target of a reference as a definition, once. Returns a reference to
        it."""
        name = self._names.get(reference)
        if name is None:
            name = self._names[reference] = f"{len(self._names)}"
            self.definitions[name] = self.close(self._resolve(reference))
        return f"#/$defs/{name}"

    def _alternatives(self, schema: Any, path: tuple[Any, ...] = ()) -> list[list[Any]]:
        """Returns combinations of schemas. A value matches ``schema`` if it matches all schemas of
        one combination. No schema of a combination has an applicator that declares keys.

        Args:
            schema: the schema.
            path: the schemas whose applicators lead to it.
        """
        self._count_visits(1)
        if any(schema is outer for outer in path):
            return []  # a cycle of references adds no alternatives
        if not isinstance(schema, Mapping):
            return [[schema]]
        factors: list[list[list[Any]]] = []
        rest: dict[str, Any] = {}
        for keyword, content in schema.items():
            applicators = self._applicators(keyword, content)
            if not any(map(self._declares, applicators)):
                rest[keyword] = content
                applicators = []
            for options in applicators:
                inner = [self._alternatives(option, (*path, schema)) for option in options]
                factors.append([*chain.from_iterable(inner)])
            if keyword == "properties":  # llguidance orders keys by this keyword's position
                factors.append([[rest]])
        return self._combine(factors if "properties" in schema else [*factors, [[rest]]])

    def _combine(self, factors: list[list[list[Any]]]) -> list[list[Any]]:
        """Returns the combinations of one element of each factor."""
        self._count_visits(math.prod(map(len, factors)))
        return [[*chain.from_iterable(chosen)] for chosen in product(*factors)]

    def _declares(self, schemas: Iterable[Any], seen: set[int] | None = None) -> bool:
        """Returns whether one of the schemas, or an applicator in it, declares keys."""
        seen = set() if seen is None else seen
        for schema in schemas:
            self._count_visits(1)
            if isinstance(schema, Mapping) and id(schema) not in seen:
                seen.add(id(schema))
                inner = chain.from_iterable(self._applicators_of(schema))
                if _has_keys(schema) or self._declares(inner, seen):
                    return True
        return False

    def _applicators_of(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        return chain.from_iterable(self._applicators(*item) for item in schema.items())

    def _applicators(self, keyword: str, content: Any) -> list[list[Any]]:
        """Returns the schemas of each applicator with this keyword. Each schema in ``allOf`` counts
        as an applicator. A value matches one or more of an applicator's schemas."""
        if keyword == "$ref" and isinstance(content, str):
            return [[self._resolve(content)]]
        if keyword == "allOf" and isinstance(content, list):
            return [[schema] for schema in content]
        return [content] if keyword in BRANCH_KEYWORDS and isinstance(content, list) else []

    def _count_visits(self, num: int) -> None:
        """Counts visits, and raises ValueError after too many. Definitions that refer to each other
        have exponentially many paths."""
        self._num_visits += num
        if self._num_visits > MAX_VISITS:
            raise ValueError("the schema has too many paths through its references and branches")

    def _count_characters(self, copied: Any) -> None:
        self._count_visits(len(repr(copied)) // CHARS_PER_VISIT)

    def _resolve(self, reference: str) -> Any:
        """Returns the schema that a reference's JSON pointer points to."""
        document, _, pointer = reference.partition("#")
        if document or pointer[:1] not in ("", "/"):
            raise ValueError(f"$ref {reference!r:.80} is not supported: use '#' or '#/...'")
        target: Any = self._root
        for escaped in unquote(pointer).split("/")[1:]:
            name = escaped.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name) if isinstance(target, list) else name]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"$ref {pointer!r:.80} does not exist") from None
        return target


def _has_keys(schema: Mapping[str, Any]) -> bool:
    """Returns whether the schema's own keywords declare keys."""
    return any(keyword in schema for keyword in (*PROPERTY_KEYWORDS, "additionalProperties"))


def _declared_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of each declared key. A key that is only in ``required`` (next to
    ``properties``, without ``additionalProperties``) has the schema True."""
    properties, required = _mapping(schema.get("properties")), schema.get("required")
    if not properties or "additionalProperties" in schema or not isinstance(required, list):
        required = ()
    return {**properties, **{name: True for name in required if name not in properties}}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Returns the value if it is a mapping, else an empty one. llguidance refuses it later."""
    return value if isinstance(value, Mapping) else {}
