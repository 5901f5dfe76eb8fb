"""YAML 1.2's core schema (yaml.org/spec/1.2.2, §10.3) on PyYAML, which reads YAML 1.1.

`no` and `on` are texts and not booleans, 017 is seventeen and not fifteen, 1:30 is a text and not ninety, 1e-4 is a
number. Keys of a mapping are unique. Aliases are read, up to MAX_VALUES expanded values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

MAX_VALUES = 100_000
"""Values of a document with aliases expanded: ten lines of aliases can expand to billions."""
MAX_DEPTH = 100
"""Levels of mappings and lists; deeper levels would exhaust the stack of recursive functions."""

TAG = "tag:yaml.org,2002:"
BASES = {"0o": 8, "0x": 16}
SCALARS: dict[str, tuple[str, list[str], Callable[[str], Any]]] = {
    "null": ("~|null|Null|NULL|", [*"~nN", ""], lambda text: None),
    "bool": ("true|True|TRUE|false|False|FALSE", [*"tTfF"], lambda text: text.lower() == "true"),
    # Before the floats, whose form fits whole numbers too.
    "int": ("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"], lambda text: int(text, BASES.get(text[:2], 10))),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
        lambda text: float(re.sub(r"\.(?=[inIN])", "", text)),
    ),
}
"""Type → its form, its first characters ("" if it may be empty), and its value."""


class CoreLoader(yaml.SafeLoader):
    """Reader of one document. Raises yaml.MarkedYAMLError with the line of a fault."""

    # Not SafeLoader's, which hold YAML 1.1's types, and constructors that end in a KeyError or an IndexError if a tag
    # does not fit its text (`!!bool maybe`, `!!int ""`).
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._counts: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Bound depth and expanded values of the nodes; the objects built from them share aliases."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._count
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _fault(f"nested deeper than {MAX_DEPTH} levels", event)
        # Nodes are counted with all that they contain; an alias counts as much as its anchor.
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        if not isinstance(event, yaml.AliasEvent):
            self._counts[node] = self._count + 1 - before
        elif node not in self._counts:  # an anchor has its name before its node is complete
            raise _fault("an alias stands within what it names", event)
        self._count = before + self._counts[node]
        if self._count > MAX_VALUES:
            raise _fault(f"more than {MAX_VALUES:,} values, counting what aliases stand for", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a repeated key: which of its values was meant?"""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                earlier = first.setdefault((key.tag, key.value), key)
                if earlier is not key:
                    line = earlier.start_mark.line + 1
                    raise _fault(f"key {key.value!r} is given twice, first in line {line}; keep one of them", key)
        return node


class CoreDumper(yaml.SafeDumper):
    """Writer for readers of YAML 1.1 and of 1.2: texts that look like another type to either are quoted."""


def _fault(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _scalar(kind: str) -> Callable[[Any, yaml.Node], Any]:
    form, _, value_of = SCALARS[kind]

    def construct(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
        text = loader.construct_scalar(node)  # type: ignore[arg-type]
        if not re.fullmatch(form, text):
            raise _fault(f"{text[:40]!r} is no {kind}", node)
        return value_of(text)

    return construct


for _kind, (_form, _beginnings, _) in SCALARS.items():
    for _class in (CoreLoader, CoreDumper):
        _class.add_implicit_resolver(TAG + _kind, re.compile(f"(?:{_form})$"), _beginnings)
    CoreLoader.add_constructor(TAG + _kind, _scalar(_kind))
# Not part of YAML 1.2: configs may share a section by `<<: *name`.
CoreLoader.add_implicit_resolver(TAG + "merge", re.compile("<<$"), ["<"])
for _name, _construct in {
    TAG + "map": yaml.SafeLoader.construct_yaml_map,
    TAG + "seq": yaml.SafeLoader.construct_yaml_seq,
    TAG + "str": yaml.SafeLoader.construct_yaml_str,
    None: yaml.SafeLoader.construct_undefined,
}.items():
    CoreLoader.add_constructor(_name, _construct)  # type: ignore[type-var]
