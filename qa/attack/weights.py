"""Adapters of generators and judges that somebody else wrote: bytes, headers, values, shapes and configs."""

from __future__ import annotations

import random
import struct
from functools import cache, partial
from pathlib import Path
from typing import Any

from qa.attack.damage import content_of, damage_bytes, damage_file, damage_value, put
from qa.attack.harness import Target, WrongError

MODULES = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k", "single_transformer_blocks.0.proj_out")
FORMS = {"peft": "adapter_model.safetensors", "diffusers": "pytorch_lora_weights.safetensors"}


@cache
def generator() -> Any:
    from edit_twins import flux_policy

    from pacorl.models.policies.flux import FluxPolicy

    policy: FluxPolicy = flux_policy()
    return policy.transformer


def prepare_lora(folder: Path, *, form: str) -> None:
    """An adapter of the tiny generator, in one of the two forms that are written."""
    import torch

    from pacorl.models.lora import save_lora

    layers = {name: module for name, module in generator().named_modules() if isinstance(module, torch.nn.Linear)}
    names = [name for name in layers if name.endswith(("attn.to_q", "attn.to_k", "attn.to_v"))][:4]
    torch.manual_seed(0)
    state = {}
    for name in names:
        state[f"{name}.lora_A.weight"] = torch.randn(2, layers[name].in_features)
        state[f"{name}.lora_B.weight"] = torch.randn(layers[name].out_features, 2)
    save_lora(folder, state, rank=2, alpha=4, targets=("to_q", "to_k", "to_v"), base="tiny")
    for other, file in FORMS.items():
        if other != form:
            (folder / file).unlink()


def read_generator_lora(folder: Path) -> None:
    """Puts the adapter on a generator. Raises WrongError if the generator then holds what is no number."""
    import copy

    import torch

    from pacorl.models.adapters import load_lora

    model = copy.deepcopy(generator())
    load_lora(model, folder)
    weights = [value for name, value in model.named_parameters() if "lora" in name]
    if not weights or not all(torch.isfinite(value).all() for value in weights):
        raise WrongError("wrong", "the generator has no adapter, or one of NaN")


@cache
def judge_model() -> Any:
    from judges import build, processor_of_any_size

    return build("qwen2_5_vl", processor_of_any_size())


def prepare_judge_lora(folder: Path) -> None:
    import copy

    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=r".*language_model.*\.(q|k)_proj")
    torch.manual_seed(0)
    get_peft_model(copy.deepcopy(judge_model()), config).save_pretrained(folder)


def read_judge_lora(folder: Path) -> None:
    import copy

    import torch

    from pacorl.judge.adapter import merge_adapter

    merged = merge_adapter(copy.deepcopy(judge_model()), str(folder))
    if not all(torch.isfinite(value).all() for value in merged.parameters()):
        raise WrongError("wrong", "the judge has weights of NaN")


def mutate(folder: Path, draw: random.Random) -> str:
    """Damages one of the folder's files."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json")]
    path = draw.choice(files or [folder / "adapter_config.json"])
    what = draw.choices(["bytes", "file", "special"], [45, 10, 45])[0]
    if what == "file":
        return f"{damage_file(path, draw)} in place of {path.name}"
    if what == "special" and path.suffix == ".json":
        return f"{damage_value(path, draw)} of {path.name}"
    if what == "special" and draw.random() < 0.1:
        content = content_of(path)
        length = struct.pack("<Q", draw.choice([0, 1, 2**63, 2**64 - 1, len(content)]))
        put(path, length + content[8:])
        return f"the length of the header of {path.name}"
    if what == "special":
        return _other_tensors(path, draw)
    return f"{damage_bytes(path, draw)} in {path.name}"


def _other_tensors(path: Path, draw: random.Random) -> str:
    """Numbers, shapes, types, names and headers that are valid in themselves."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save_file

    what = draw.choice(["nan", "inf", "shape", "dtype", "drop", "rename", "extra", "empty", "metadata", "double"])
    try:
        with safe_open(path, "pt") as opened:
            metadata = dict(opened.metadata() or {})
        tensors = load_file(path)
    except (OSError, SafetensorError):  # no file of weights any more
        tensors = {}
    if not tensors:
        return damage_bytes(path, draw)
    name = draw.choice(sorted(tensors))
    value = tensors[name]
    if what in ("nan", "inf"):
        value.view(-1)[draw.randrange(value.numel())] = float(what)
    elif what == "metadata":
        odd = ["{", "[]", "null", '{"transformer.r": "x"}', '{"a": NaN}', "9" * 5000]
        metadata = {key: draw.choice(odd) for key in metadata or {"format": ""}}
    else:
        tensors = _changed(what, tensors, name, draw)
    save_file(tensors, path, metadata=metadata or None)
    return f"must refuse {what}" if what in ("nan", "inf") else what


def _changed(what: str, tensors: dict[str, Any], name: str, draw: random.Random) -> dict[str, Any]:
    import torch

    value, others = tensors[name], {key: tensor for key, tensor in tensors.items() if key != name}
    match what:
        case "shape":
            shapes = [value[:1], value.T, value.unsqueeze(0), value.reshape(-1), value[:0]]
            return others | {name: draw.choice(shapes).contiguous()}
        case "dtype":
            kinds = [torch.int8, torch.bool, torch.float64, torch.int64, torch.float8_e4m3fn]
            return others | {name: value.to(draw.choice(kinds))}
        case "rename":
            old, new = draw.choice([".lora_A", ".0", "weight", "attn"]), draw.choice(["", ".x", ".1", "lora_te."])
            return others | {name.replace(old, new): value}
        case "extra":
            names = ["x", f"{name}.alpha", "lora_te_x.lora_A.weight", "transformer.x.dora_scale"]
            return tensors | {draw.choice(names): torch.ones(2)}
        case "double":
            return tensors | {f"base_model.model.{key}": tensor.clone() for key, tensor in tensors.items()}
    return others if what == "drop" else {}


def targets() -> list[Target]:
    rows: dict[str, tuple[Any, Any]] = {
        **{f"generator-{form}": (partial(prepare_lora, form=form), read_generator_lora) for form in FORMS},
        "judge": (prepare_judge_lora, read_judge_lora),
    }
    names = (*FORMS.values(), "adapter_config.json", "/work")
    return [
        Target(name=f"weights/{name}", prepare=prepare, mutate=mutate, run=run, names=names)
        for name, (prepare, run) in rows.items()
    ]
