"""How ComfyUI loads a folder of nodes and executes a graph of them, in small.

After nodes.py (`load_custom_node`) and execution.py (`validate_inputs`, `get_input_data`, `map_node_over_list`,
`get_output_data`) of ComfyUI, which is on no package index: a node is a class with INPUT_TYPES, RETURN_TYPES and the
name of its FUNCTION; a link is [node, number of its output] and must have the input's type; values travel as lists, the
function is called once for each; and all of it happens in inference mode.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

WIDGETS = {"STRING": str, "INT": int, "FLOAT": (int, float), "BOOLEAN": bool}


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


def execute(nodes: Mapping[str, type], graph: Mapping[str, Mapping[str, Any]], constants: Mapping[str, Any]) -> Any:
    """The outputs of every node of a graph in API form, {id: {class_type, inputs}}, links to earlier nodes.

    Args:
        constants: id → the one output of a node that is not of this pack, as (type, value).
    """
    types = {name: [kind] for name, (kind, _) in constants.items()}
    outputs = {name: [[value]] for name, (_, value) in constants.items()}
    for name, entry in graph.items():
        cls = nodes[entry["class_type"]]
        _validate(cls, entry["inputs"], types)
        calls = {
            key: outputs[value[0]][value[1]] if isinstance(value, list) else [value]
            for key, value in entry["inputs"].items()
        }
        with torch.inference_mode():
            longest = max(map(len, calls.values()))
            slices = [{key: values[min(i, len(values) - 1)] for key, values in calls.items()} for i in range(longest)]
            node: Any = cls()
            results = [getattr(node, node.FUNCTION)(**arguments) for arguments in slices]
        assert all(isinstance(result, tuple) and len(result) == len(cls.RETURN_TYPES) for result in results)
        types[name], outputs[name] = list(cls.RETURN_TYPES), [list(column) for column in zip(*results, strict=True)]
    return outputs


def _validate(cls: Any, inputs: Mapping[str, Any], types: Mapping[str, list[str]]) -> None:
    declared = cls.INPUT_TYPES()
    known = {**declared["required"], **declared.get("optional", {})}
    if missing := declared["required"].keys() - inputs.keys():
        raise ValueError(f"Required input is missing: {sorted(missing)}")
    for key, value in inputs.items():
        kind, *rest = known[key]
        if isinstance(value, list):
            if types[value[0]][value[1]] != kind:
                raise ValueError(
                    f"Return type mismatch between linked nodes: {key}, {types[value[0]][value[1]]} != {kind}"
                )
            continue
        assert isinstance(value, WIDGETS[kind]), (key, value)
        bounds = rest[0] if rest else {}
        if value_below := [value for bound in ("min",) if bound in bounds and value < bounds[bound]]:
            raise ValueError(f"Value {value_below[0]} smaller than min of {bounds['min']}: {key}")
