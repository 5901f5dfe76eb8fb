"""A folder of ComfyUI's nodes, and the API form of its workflow files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

SEED_CONTROL = ("fixed", "increment", "decrement", "randomize")
"""Further values of a seed's widget, which are the page's own."""


def load_custom_node(folder: Path) -> ModuleType:
    """Imports a folder of custom nodes under its path, as a package."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def graph_of(workflow: Mapping[str, Any], nodes: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """The API form of a workflow file's nodes, {id: {class_type, inputs}}: links, and the widgets' values in order."""
    links = {link[0]: link for link in workflow["links"]}
    graph = {}
    for entry in sorted(workflow["nodes"], key=lambda entry: entry["order"]):
        if entry["type"] not in nodes:
            continue
        cls: Any = nodes[entry["type"]]
        declared = cls.INPUT_TYPES()
        fields = {**declared["required"], **declared.get("optional", {})}
        inputs: dict[str, Any] = {}
        for slot, socket in enumerate(entry["inputs"]):
            if socket["link"] is not None:
                number, source, output, target, at, kind = links[socket["link"]]
                assert (number, target, at, kind) == (socket["link"], entry["id"], slot, socket["type"])
                inputs[socket["name"]] = [str(source), output]
        sockets = {socket["name"] for socket in entry["inputs"]}
        values = [value for value in entry["widgets_values"] if value not in SEED_CONTROL]
        widgets = [name for name in fields if name not in sockets]
        if entry["type"] == "LoadImage":
            values = values[:1]  # the second is the button for a file
        inputs |= dict(zip(widgets, values, strict=True))
        graph[str(entry["id"])] = {"class_type": entry["type"], "inputs": inputs}
    return graph
