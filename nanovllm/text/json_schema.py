"""Changes a JSON schema so that objects cannot have undeclared keys."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote

PROPERTY_KEYWORDS = ("properties", "patternProperties")  # their values map names to schemas
# Keywords whose value is a schema, or a list of schemas, of an object's or array's children.
CHILD_KEYWORDS = ("additionalProperties", "items", "prefixItems", "additionalItems")
BRANCH_KEYWORDS = ("anyOf", "oneOf")
# Keywords that references need. The result has its own "$defs" and does not need the others.
DEFINITION_KEYWORDS = ("$defs", "definitions", "$id", "$anchor")

MAX_VISITS = 50_000  # visits of applicators; they take about a quarter of a second

# JSON Schema's term is "in-place applicator": a keyword with schemas for the same value. This is
# ("$ref", reference), ("anyOf" or "oneOf", list of schemas) or ("allOf", one of its schemas).
Applicator: TypeAlias = tuple[str, Any]


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Forbids undeclared keys where a schema has ``properties`` or ``patternProperties`` and no
    ``additionalProperties``, at any depth.

    As with ``"unevaluatedProperties": false``, ``$ref``, ``allOf`` and the matching branch of
    ``anyOf`` or ``oneOf`` also declare keys. llguidance does not support that keyword, so the
    result sets ``additionalProperties`` to false next to all keys that are declared for an object.

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
    return {**closed, "$defs": closer.definitions} if closer.definitions else closed


@dataclass(frozen=True)
class _DeclaredKeys:
    """The keys that one or more schemas declare for the same object.

    Attributes:
        properties: the schemas of each key in ``properties``. A key that is only in ``required``
            (next to ``properties``) has none.
        patterns: the keys of ``patternProperties``.
        has_properties: whether a schema has ``properties`` or ``patternProperties``, even empty.
        has_additional: whether a schema has ``additionalProperties``.
        varies: whether branches declare further keys, which are not included here.
    """

    properties: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    has_properties: bool = False
    has_additional: bool = False
    varies: bool = False

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "_DeclaredKeys":
        """Returns the keys that the schema's own keywords declare, without its applicators."""
        properties, patterns = (_mapping(schema.get(keyword)) for keyword in PROPERTY_KEYWORDS)
        required = schema.get("required") if properties else ()
        if not isinstance(required, list):
            required = []  # llguidance refuses the schema later
        return cls(
            {name: (value,) for name, value in properties.items()}
            | {name: () for name in required if name not in properties},
            tuple(patterns),
            has_properties=any(keyword in schema for keyword in PROPERTY_KEYWORDS),
            has_additional="additionalProperties" in schema,
        )

    def __or__(self, other: "_DeclaredKeys") -> "_DeclaredKeys":
        ours, theirs = self.properties, other.properties
        return _DeclaredKeys(
            {name: ours.get(name, ()) + theirs.get(name, ()) for name in {**ours, **theirs}},
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            self.has_properties or other.has_properties,
            self.has_additional or other.has_additional,
            self.varies or other.varies,
        )


NO_KEYS = _DeclaredKeys()


class _Closer:
    """Closes the objects of one schema: forbids undeclared keys.

    The applicators of a schema (``$ref``, ``allOf``, ``anyOf``, ``oneOf``) describe the same value
    as the schema. If the declared keys depend on the branch of an applicator, the object is closed
    within each branch, and other applicators with branches move into that branch. A property is
    shared if several schemas of the value describe it. A shared property is closed with the keys
    of all these schemas.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        self._root = root
        self._names: dict[object, str] = {}  # names of definitions, by reference and function
        self._num_visits = 0

    def close(self, schema: Any) -> Any:
        """Returns a copy of a value's only schema that allows no undeclared keys."""
        counts = self._count_schemas(schema)
        shared = tuple(name for name, count in counts.items() if count > 1)
        return self._close(schema, NO_KEYS, (), shared)

    def _close(
        self, schema: Any, outer_keys: _DeclaredKeys, more: tuple[Any, ...], shared: tuple[str, ...]
    ) -> Any:
        """Returns a copy of one of a value's schemas that allows only the keys that any of the
        value's schemas declares.

        Args:
            schema: the schema to copy.
            outer_keys: the keys that the other schemas of the value declare.
            more: further schemas of the value, with branches, to include in the copy.
            shared: properties that several of the value's schemas describe.
        """
        if schema is True and (more or outer_keys != NO_KEYS):
            schema = {}
        if not isinstance(schema, Mapping):
            return schema
        own, applicators = _DeclaredKeys.of(schema), list(_applicators(schema))
        declared = [self._declared_by(applicator) for applicator in applicators]
        inner = [i for i, keys in enumerate(declared) if keys.varies]
        if not inner and not more and own == outer_keys == NO_KEYS:
            # If a single applicator declares all the keys, closing that applicator is enough.
            declaring = [i for i, keys in enumerate(declared) if keys != NO_KEYS]
            inner = declaring if len(declaring) == 1 else []
        outside = [keys for i, keys in enumerate(declared) if i not in inner]
        all_keys = self._merge([outer_keys, own, *outside])
        more = (*(_as_schema(applicators[i]) for i in inner[1:]), *more)

        def new_content(i: int) -> Any:
            if i not in inner:
                return self._apply(applicators[i], self._close_children, shared)
            if i == inner[0]:
                return self._apply(applicators[i], self._close, all_keys, more, shared)
            return None

        new = self._assemble(schema, [new_content(i) for i in range(len(applicators))], shared)
        if inner:
            return new
        if more:
            return _with_all_of(new, self._close(more[0], all_keys, more[1:], shared))
        return self._close_leaf(new, all_keys, shared)

    def _close_leaf(
        self, schema: dict[str, Any], all_keys: _DeclaredKeys, shared: tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns a schema without branches, closed, and with its shared properties closed."""
        inside = {
            name: self.close({"allOf": [*all_keys.properties[name]]})
            for name in shared
            if name in all_keys.properties
        }
        if not all_keys.has_properties or all_keys.has_additional:
            return _with_all_of(schema, {"properties": inside}) if inside else schema
        given = [tuple(_mapping(schema.get(keyword))) for keyword in PROPERTY_KEYWORDS]
        if not inside and given == [tuple(all_keys.properties), all_keys.patterns]:
            return {**schema, "additionalProperties": False}
        closing = {
            "properties": dict.fromkeys(all_keys.properties, True) | inside,
            "patternProperties": dict.fromkeys(all_keys.patterns, True),
            "additionalProperties": False,
        }
        return _with_all_of(schema, {key: value for key, value in closing.items() if value != {}})

    def _close_children(self, schema: Any, shared: tuple[str, ...] = ()) -> Any:
        """Returns a copy of a value's schema in which only the value's children are closed."""
        if not isinstance(schema, Mapping):
            return schema
        new = [self._apply(item, self._close_children, shared) for item in _applicators(schema)]
        return self._assemble(schema, new, shared)

    def _declared_by(
        self, applicator: Applicator, seen: frozenset[str] = frozenset()
    ) -> _DeclaredKeys:
        """Returns the keys that an applicator declares. ``seen`` holds the references on the path
        to it."""
        self._count_visit()
        keyword, schema = applicator
        if keyword in BRANCH_KEYWORDS:
            declared = [self._declared_by(("allOf", branch), seen) for branch in schema]
            return _DeclaredKeys(varies=any(keys != NO_KEYS for keys in declared))
        if keyword == "$ref":
            if schema in seen:
                return NO_KEYS
            schema, seen = self._resolve(schema), seen | {schema}
        if not isinstance(schema, Mapping):
            return NO_KEYS
        declared = [self._declared_by(inner, seen) for inner in _applicators(schema)]
        return self._merge([_DeclaredKeys.of(schema), *declared])

    def _merge(self, declared: Iterable[_DeclaredKeys]) -> _DeclaredKeys:
        """Returns the union of keys that several schemas of one object declare."""
        merged = NO_KEYS
        for keys in declared:
            if keys != NO_KEYS:
                merged = keys if merged == NO_KEYS else merged | keys
                self._count_visit(len(merged.properties) // 16)  # merging 16 takes as long as one
        return merged

    def _count_schemas(self, schema: Any, seen: frozenset[str] = frozenset()) -> Counter[str]:
        """Counts, for each property, how many of the value's schemas describe it. Of the branches
        of an ``anyOf`` or ``oneOf``, only the one with the highest count is counted."""
        self._count_visit()
        if not isinstance(schema, Mapping):
            return Counter()
        counts = Counter(_mapping(schema.get("properties")).keys())
        for keyword, content in _applicators(schema):
            if keyword in BRANCH_KEYWORDS:
                most: dict[str, int] = {}
                for branch in content:
                    for name, count in self._count_schemas(branch, seen).items():
                        most[name] = max(count, most.get(name, 0))
                counts.update(most)
            elif keyword == "allOf":
                counts.update(self._count_schemas(content, seen))
            elif content not in seen:
                counts.update(self._count_schemas(self._resolve(content), seen | {content}))
        return counts

    def _count_visit(self, num: int = 1) -> None:
        """Counts visits, and raises ValueError after too many. Definitions that refer to each other
        have exponentially many paths."""
        self._num_visits += num
        if self._num_visits > MAX_VISITS:
            raise ValueError("the schema has too many paths through its references and branches")

    def _apply(self, applicator: Applicator, function: Callable[..., Any], *context: Any) -> Any:
        """Returns an applicator's content with ``function`` applied to each of its schemas."""
        keyword, content = applicator
        if keyword in BRANCH_KEYWORDS:
            return [function(branch, *context) for branch in content]
        if keyword == "$ref":
            return self._define(content, function, *context)
        return function(content, *context)

    def _define(self, reference: str, function: Callable[..., Any], *context: Any) -> str:
        """Applies ``function`` to the target of a reference, once, and stores the result as a
        definition. Returns a reference to it."""
        key = reference, function.__name__, repr(context)
        name = self._names.get(key)
        if name is None:
            target = self._resolve(reference)
            name = self._names[key] = f"{len(self._names)}"
            self.definitions[name] = function(target, *context)
        return f"#/$defs/{name}"

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

    def _assemble(
        self, schema: Mapping[str, Any], new_contents: Iterable[Any], shared: tuple[str, ...]
    ) -> dict[str, Any]:
        """Returns a copy of the schema with new contents of its applicators, and children closed.

        An applicator whose new content is None is dropped. Shared properties are not closed: that
        takes the keys of all their schemas."""
        contents: dict[str, list[Any]] = {}
        for (keyword, _), content in zip(_applicators(schema), new_contents, strict=True):
            contents.setdefault(keyword, []).extend([] if content is None else [content])
        new: dict[str, Any] = {}
        for keyword, content in schema.items():
            if keyword in contents:
                if found := contents[keyword]:
                    new[keyword] = found if keyword == "allOf" else found[0]
            elif keyword in PROPERTY_KEYWORDS and isinstance(content, Mapping):
                unclosed = shared if keyword == "properties" else ()
                new[keyword] = {
                    key: self._close_children(value) if key in unclosed else self.close(value)
                    for key, value in content.items()
                }
            elif keyword in CHILD_KEYWORDS:
                is_list = isinstance(content, list)
                new[keyword] = [*map(self.close, content)] if is_list else self.close(content)
            elif keyword not in DEFINITION_KEYWORDS:
                new[keyword] = content
        return new


def _applicators(schema: Mapping[str, Any]) -> Iterator[Applicator]:
    """Yields the applicators of a schema, one for each schema in ``allOf``."""
    for keyword, content in schema.items():
        if keyword == "allOf" and isinstance(content, list):
            yield from ((keyword, item) for item in content)
        elif isinstance(content, {"anyOf": list, "oneOf": list, "$ref": str}.get(keyword, ())):
            yield keyword, content


def _as_schema(applicator: Applicator) -> Any:
    """Returns a schema with the applicator alone."""
    keyword, content = applicator
    return content if keyword == "allOf" else {keyword: content}


def _with_all_of(schema: dict[str, Any], other: Any) -> dict[str, Any]:
    return {**schema, "allOf": [*schema.get("allOf", []), other]}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Returns the value if it is a mapping, else an empty one: llguidance refuses it later."""
    return value if isinstance(value, Mapping) else {}
