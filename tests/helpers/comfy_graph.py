"""How ComfyUI loads a folder of nodes and executes a workflow of them, in small.

After nodes.py (`load_custom_node`), execution.py (`validate_inputs`, `get_input_data`, `map_node_over_list`,
`get_output_data`) and the page's graphToPrompt of ComfyUI, which is on no package index: a node is a class with
INPUT_TYPES, RETURN_TYPES and the name of its FUNCTION; a link is [node, number of its output] and must have the input's
type; hidden inputs are filled in; an output node may return {"ui": …}; all of it happens in inference mode. `CORE` are
ComfyUI's own nodes of the workflows, with their inputs and outputs, and in place of a model a function of the test.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

WIDGETS = {"STRING": str, "INT": int, "FLOAT": (int, float), "BOOLEAN": bool}
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


def core(inputs: Mapping[str, Any], outputs: tuple[str, ...], function: Any = None) -> type:
    """A node of ComfyUI's own with these inputs and outputs; without a function it shows its input."""

    class Node:
        RETURN_TYPES, FUNCTION, OUTPUT_NODE = outputs, "run", function is None
        shown: ClassVar[list[Any]] = []

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
            return {"required": {name: kind if isinstance(kind, tuple) else (kind,) for name, kind in inputs.items()}}

        def run(self, **values: Any) -> Any:
            if function is None:
                type(self).shown = [*type(self).shown, *values.values()]
                return {"ui": {}}
            result = function(**values)
            return result if isinstance(result, tuple) else (result,)

    return Node


def core_nodes(images: Mapping[str, Any], redrawn: Any = None) -> dict[str, type]:
    """ComfyUI's own nodes of the workflows.

    Args:
        images: file name → IMAGE of LoadImage.
        redrawn: (page, mask) → the page that a model would paint.
    """
    combo = (["euler", "simple", "model.safetensors", *images],)
    conditioned = {"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT"}
    sampled = {"seed": "INT", "steps": "INT", "cfg": "FLOAT", "sampler_name": combo, "scheduler": combo}
    pasted = {"destination": "IMAGE", "source": "IMAGE", "x": "INT", "y": "INT", "resize_source": "BOOLEAN"}

    def paste(destination: Any, source: Any, mask: Any, **_: Any) -> Any:
        return destination * (1 - mask[..., None]) + source * mask[..., None]

    return {
        "LoadImage": core({"image": combo}, ("IMAGE", "MASK"), lambda image: (images[image], None)),
        "ImageBatch": core(
            {"image1": "IMAGE", "image2": "IMAGE"}, ("IMAGE",), lambda **each: torch.cat([*each.values()])
        ),
        "PreviewAny": core({"source": "*"}, ()),
        "PreviewImage": core({"images": "IMAGE"}, ()),
        "CheckpointLoaderSimple": core({"ckpt_name": combo}, ("MODEL", "CLIP", "VAE"), lambda **_: (1, 2, 3)),
        "CLIPTextEncode": core({"text": "STRING", "clip": "CLIP"}, ("CONDITIONING",), lambda text, clip: text),
        "VAEEncodeForInpaint": core(
            {"pixels": "IMAGE", "vae": "VAE", "mask": "MASK", "grow_mask_by": "INT"},
            ("LATENT",),
            lambda pixels, mask, **_: ({"pixels": pixels, "mask": mask},),
        ),
        "KSampler": core(
            {**conditioned, **sampled, "denoise": "FLOAT"},
            ("LATENT",),
            lambda latent_image, **_: ({"pixels": redrawn(latent_image["pixels"], latent_image["mask"])},),
        ),
        "VAEDecode": core({"samples": "LATENT", "vae": "VAE"}, ("IMAGE",), lambda samples, vae: samples["pixels"]),
        "ImageCompositeMasked": core({**pasted, "mask": "MASK"}, ("IMAGE",), paste),
    }


def graph_of(workflow: Mapping[str, Any], nodes: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """The API form of a workflow file, {id: {class_type, inputs}}: links, and the widgets' values in order."""
    links = {link[0]: link for link in workflow["links"]}
    graph = {}
    for entry in sorted(workflow["nodes"], key=lambda entry: entry["order"]):
        if entry["type"] == "Note":
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


def execute(nodes: Mapping[str, type], graph: Mapping[str, Mapping[str, Any]], constants: Mapping[str, Any]) -> Any:
    """The outputs of every node of a graph in API form, links to earlier nodes.

    Args:
        constants: id → the one output of a node that is not of this pack, as (type, value).
    """
    types = {name: [kind] for name, (kind, _) in constants.items()}
    outputs = {name: [[value]] for name, (_, value) in constants.items()}
    for name, entry in graph.items():
        cls: Any = nodes[entry["class_type"]]
        _validate(cls, entry["inputs"], types)
        calls = {
            key: outputs[value[0]][value[1]] if isinstance(value, list) else [value]
            for key, value in entry["inputs"].items()
        }
        for key, kind in cls.INPUT_TYPES().get("hidden", {}).items():
            calls[key] = [{"PROMPT": dict(graph), "EXTRA_PNGINFO": {"workflow": {"nodes": []}}}[kind]]
        with torch.inference_mode():
            longest = max(map(len, calls.values()))
            slices = [{key: values[min(i, len(values) - 1)] for key, values in calls.items()} for i in range(longest)]
            node: Any = cls()
            results = [getattr(node, node.FUNCTION)(**arguments) for arguments in slices]
        if getattr(cls, "OUTPUT_NODE", False) and all(isinstance(result, dict) for result in results):
            outputs[name] = [results]
            continue
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
            if kind not in ("*", types[value[0]][value[1]]):
                raise ValueError(
                    f"Return type mismatch between linked nodes: {key}, {types[value[0]][value[1]]} != {kind}"
                )
            continue
        if isinstance(kind, list):
            assert value in kind, (key, value)
            continue
        assert isinstance(value, WIDGETS[kind]), (key, value)
        bounds = rest[0] if rest else {}
        if value_below := [value for bound in ("min",) if bound in bounds and value < bounds[bound]]:
            raise ValueError(f"Value {value_below[0]} smaller than min of {bounds['min']}: {key}")
