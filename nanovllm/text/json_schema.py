"""JSON schemas of objects without undeclared keys."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote

PROPERTIES = ("properties", "patternProperties")  # their values are maps of schemas
# Keywords that hold a schema, or a list of schemas, of what is in an object or array.
CONTENTS = ("additionalProperties", "items", "prefixItems", "additionalItems")
BRANCHES = ("anyOf", "oneOf")
# What references are resolved by. That is done here, so the result does not need them.
DEFINITIONS = ("$defs", "definitions", "$id", "$anchor")

MAX_VISITS = 50_000  # of parts: about a quarter of a second

Part: TypeAlias = tuple[str, Any]


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Forbids undeclared keys where a schema has ``properties`` or ``patternProperties`` and no
    ``additionalProperties``, at any depth.

    As with ``"unevaluatedProperties": false``, keys are also declared by ``$ref``, ``allOf`` and
    the branch of ``anyOf`` or ``oneOf`` that an object matches. llguidance does not know that
    keyword, so the result has ``additionalProperties`` beside all keys declared for an object.

    Returns:
        A new schema. Its references lead to ``$defs`` of its own.

    Raises:
        ValueError: what a reference names does not exist, or is in another document, or there are
            too many ways through references and branches.
    """
    closer = _Closer(schema)
    try:
        closed = closer.close(schema)
    except RecursionError:
        raise ValueError("the schema's references are nested too deeply") from None
    return {**closed, "$defs": closer.definitions} if closer.definitions else closed


@dataclass(frozen=True)
class _Declared:
    """What schemas of the same object say of its keys.

    Attributes:
        properties: the schemas of each key in ``properties``; none for a key that only a
            ``required`` beside ``properties`` names.
        patterns: the keys of ``patternProperties``.
        is_given: one of these keywords is there, even if it is empty.
        is_said: ``additionalProperties`` says which other keys there may be.
        varies: branches, which are left out here, declare more.
    """

    properties: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    is_given: bool = False
    is_said: bool = False
    varies: bool = False

    @classmethod
    def by(cls, schema: Mapping[str, Any]) -> "_Declared":
        """What the schema's own keywords say."""
        properties, patterns = (_mapping(schema.get(keyword)) for keyword in PROPERTIES)
        required = schema.get("required") if properties else ()
        if not isinstance(required, list):
            required = []  # llguidance refuses what is no list
        return cls(
            {name: (value,) for name, value in properties.items()}
            | {name: () for name in required if name not in properties},
            tuple(patterns),
            is_given=any(keyword in schema for keyword in PROPERTIES),
            is_said="additionalProperties" in schema,
        )

    def __or__(self, other: "_Declared") -> "_Declared":
        mine, others = self.properties, other.properties
        return _Declared(
            {name: mine.get(name, ()) + others.get(name, ()) for name in {**mine, **others}},
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            self.is_given or other.is_given,
            self.is_said or other.is_said,
            self.varies or other.varies,
        )


NOTHING = _Declared()


class _Closer:
    """Closes the objects of one schema.

    The parts of a schema are the schemas in its ``$ref``, ``allOf``, ``anyOf`` and ``oneOf``,
    which describe the same value. Where the declared keys depend on the branches of a part, the
    object is closed within each branch, and other parts with branches move into it. A property
    that several parts have a schema for is closed with the keys of all these schemas.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        self._root = root
        self._names: dict[object, str] = {}  # of the definitions, by what they are made of
        self._num_visits = 0

    def close(self, schema: Any) -> Any:
        """A copy of a value's schema that allows no undeclared keys."""
        counts = self._count_schemas(schema)
        shared = tuple(name for name, count in counts.items() if count > 1)
        return self._close(schema, NOTHING, (), shared)

    def _close(
        self, schema: Any, outer: _Declared, others: tuple[Any, ...], shared: tuple[str, ...]
    ) -> Any:
        """A copy of one of a value's schemas that allows no keys but those declared in any.

        Args:
            schema: the schema to copy.
            outer: what the schemas beside it declare.
            others: more schemas of the value, with branches. The copy includes them.
            shared: properties for which several of the value's schemas have a schema.
        """
        if schema is True and (others or outer != NOTHING):
            schema = {}
        if not isinstance(schema, Mapping):
            return schema
        own, parts = _Declared.by(schema), list(_parts(schema))
        surveys = [self._survey(part) for part in parts]
        inner = [i for i, survey in enumerate(surveys) if survey.varies]
        if not inner and not others and own == outer == NOTHING:
            # Where one part declares everything, that part can be closed.
            declaring = [i for i, survey in enumerate(surveys) if survey != NOTHING]
            inner = declaring if len(declaring) == 1 else []
        outside = [survey for i, survey in enumerate(surveys) if i not in inner]
        known = self._merge([outer, own, *outside])
        others = (*(_as_schema(parts[i]) for i in inner[1:]), *others)

        def new_part(i: int) -> Any:
            if i not in inner:
                return self._map(parts[i], self._open, shared)
            if i == inner[0]:
                return self._map(parts[i], self._close, known, others, shared)
            return None

        new = self._assemble(schema, [new_part(i) for i in range(len(parts))], shared)
        if inner:
            return new
        if others:
            return _both(new, self._close(others[0], known, others[1:], shared))
        return self._close_leaf(new, known, shared)

    def _close_leaf(
        self, schema: dict[str, Any], known: _Declared, shared: tuple[str, ...]
    ) -> dict[str, Any]:
        """The schema with what closes the object and its shared properties."""
        inside = {
            name: self.close({"allOf": [*known.properties[name]]})
            for name in shared
            if name in known.properties
        }
        if not known.is_given or known.is_said:
            return _both(schema, {"properties": inside}) if inside else schema
        given = [tuple(_mapping(schema.get(keyword))) for keyword in PROPERTIES]
        if not inside and given == [tuple(known.properties), known.patterns]:
            return {**schema, "additionalProperties": False}
        closing = {
            "properties": dict.fromkeys(known.properties, True) | inside,
            "patternProperties": dict.fromkeys(known.patterns, True),
            "additionalProperties": False,
        }
        return _both(schema, {key: value for key, value in closing.items() if value != {}})

    def _open(self, schema: Any, shared: tuple[str, ...] = ()) -> Any:
        """A copy of a value's schema that is closed for what is in the value only."""
        if not isinstance(schema, Mapping):
            return schema
        parts = [self._map(part, self._open, shared) for part in _parts(schema)]
        return self._assemble(schema, parts, shared)

    def _survey(self, part: Part, seen: frozenset[str] = frozenset()) -> _Declared:
        """What a part declares."""
        self._visit()
        keyword, schema = part
        if keyword in BRANCHES:
            surveys = [self._survey(("allOf", branch), seen) for branch in schema]
            return _Declared(varies=any(survey != NOTHING for survey in surveys))
        if keyword == "$ref":
            if schema in seen:
                return NOTHING
            schema, seen = self._resolve(schema), seen | {schema}
        if not isinstance(schema, Mapping):
            return NOTHING
        surveys = [self._survey(inner, seen) for inner in _parts(schema)]
        return self._merge([_Declared.by(schema), *surveys])

    def _merge(self, surveys: Iterable[_Declared]) -> _Declared:
        """What several schemas of one object declare together."""
        merged = NOTHING
        for survey in surveys:
            if survey != NOTHING:
                merged = survey if merged == NOTHING else merged | survey
                self._visit(len(merged.properties) // 16)  # which takes as long as a visit
        return merged

    def _count_schemas(self, schema: Any, seen: frozenset[str] = frozenset()) -> Counter[str]:
        """How many schemas the value's schemas have for each property, in the branches that have
        most."""
        self._visit()
        if not isinstance(schema, Mapping):
            return Counter()
        counts = Counter(_mapping(schema.get("properties")).keys())
        for keyword, content in _parts(schema):
            if keyword in BRANCHES:
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

    def _visit(self, num: int = 1) -> None:
        """Raises ValueError after too many: definitions that refer to each other have as many paths
        between them as they have orders."""
        self._num_visits += num
        if self._num_visits > MAX_VISITS:
            raise ValueError("the schema has too many ways through its references and branches")

    def _map(self, part: Part, function: Callable[..., Any], *context: Any) -> Any:
        """The content of a part with ``function`` applied to its schemas."""
        keyword, content = part
        if keyword in BRANCHES:
            return [function(branch, *context) for branch in content]
        if keyword == "$ref":
            return self._define(content, function, *context)
        return function(content, *context)

    def _define(self, reference: str, function: Callable[..., Any], *context: Any) -> str:
        """A reference to a definition: ``function`` of what ``reference`` leads to."""
        key = reference, function.__name__, repr(context)
        name = self._names.get(key)
        if name is None:
            target = self._resolve(reference)
            name = self._names[key] = f"{len(self._names)}"
            self.definitions[name] = function(target, *context)
        return f"#/$defs/{name}"

    def _resolve(self, reference: str) -> Any:
        """The schema that a reference leads to, by its JSON pointer."""
        document, _, pointer = reference.partition("#")
        if document or pointer[:1] not in ("", "/"):
            raise ValueError(f"$ref {reference!r:.80} is not served: only '#' and '#/...' are")
        target: Any = self._root
        for escaped in unquote(pointer).split("/")[1:]:
            name = escaped.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name) if isinstance(target, list) else name]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"$ref {pointer!r:.80} does not exist") from None
        return target

    def _assemble(
        self, schema: Mapping[str, Any], parts: Iterable[Any], shared: tuple[str, ...]
    ) -> dict[str, Any]:
        """A copy of the schema with other parts, None for those to leave out, and with what is in
        the value closed; but for shared properties, which cannot be closed alone."""
        contents: dict[str, list[Any]] = {}
        for (keyword, _), part in zip(_parts(schema), parts, strict=True):
            contents.setdefault(keyword, []).extend([] if part is None else [part])
        new: dict[str, Any] = {}
        for keyword, content in schema.items():
            if keyword in contents:
                if found := contents[keyword]:
                    new[keyword] = found if keyword == "allOf" else found[0]
            elif keyword in PROPERTIES and isinstance(content, Mapping):
                unclosed = shared if keyword == "properties" else ()
                new[keyword] = {
                    key: self._open(value) if key in unclosed else self.close(value)
                    for key, value in content.items()
                }
            elif keyword in CONTENTS:
                is_list = isinstance(content, list)
                new[keyword] = [*map(self.close, content)] if is_list else self.close(content)
            elif keyword not in DEFINITIONS:
                new[keyword] = content
        return new


def _parts(schema: Mapping[str, Any]) -> Iterator[Part]:
    """Keyword and content of each part; a schema for each of ``allOf``."""
    for keyword, content in schema.items():
        if keyword == "allOf" and isinstance(content, list):
            yield from ((keyword, item) for item in content)
        elif isinstance(content, {"anyOf": list, "oneOf": list, "$ref": str}.get(keyword, ())):
            yield keyword, content


def _as_schema(part: Part) -> Any:
    keyword, content = part
    return content if keyword == "allOf" else {keyword: content}


def _both(schema: dict[str, Any], other: Any) -> dict[str, Any]:
    return {**schema, "allOf": [*schema.get("allOf", []), other]}


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value, or an empty mapping for one that llguidance will refuse."""
    return value if isinstance(value, Mapping) else {}
