"""LoRA files are read as they are meant, strength included; what cannot be read so is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hub_cache import snapshot_in
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pacorl.models.lora import METADATA, Lora, adapter_file, read_lora, save_lora

MODULES = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k")
WIDTH, RANK, ALPHA = 16, 4, 8


def state_of(modules: tuple[str, ...] = MODULES, *, rank: int = RANK) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"A": (rank, WIDTH), "B": (WIDTH, rank)}
    return {f"{module}.lora_{side}.weight": torch.randn(shapes[side]) for module in modules for side in shapes}


def changes(lora: Lora) -> dict[str, Tensor]:
    """What the adapter adds to each weight."""
    added = {}
    for module, rank in lora.ranks.items():
        product = lora.state[f"{module}.lora_B.weight"] @ lora.state[f"{module}.lora_A.weight"]
        added[module] = lora.alphas[module] / rank * product
    return added


TRUE = changes(Lora(state_of(), dict.fromkeys(MODULES, float(ALPHA))))


def saved(path: Path, tensors: Mapping[str, Tensor], **metadata: Any) -> Path:
    """A safetensors file; `metadata` is what diffusers writes of the adapter's config."""
    entries = {METADATA: json.dumps({f"transformer.{key}": value for key, value in metadata.items()})}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata=entries if metadata else None)
    return path


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def alphas(value: float = ALPHA) -> dict[str, Tensor]:
    return {f"{module}.alpha": torch.tensor(value) for module in MODULES}


def down_up(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): value for name, value in tensors.items()}


def peft(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """A folder as PEFT saves it."""
    saved(folder / "adapter_model.safetensors", prefixed("base_model.model.", tensors))
    document = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["to_q", "to_k"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


# --- reading ---------------------------------------------------------------------------------------------------


WITH_ALPHAS = {
    "no prefix": state_of(),
    "down and up": prefixed("transformer.", down_up(state_of())),
    "default_0": {name.replace(".weight", ".default_0.weight"): value for name, value in state_of().items()},
} | {
    prefix: prefixed(prefix, state_of())
    for prefix in ("transformer.", "diffusion_model.", "_orig_mod.", "module.", "diffusion_model.transformer.")
}


@pytest.mark.parametrize("form", WITH_ALPHAS)
def test_alpha_stands_in_tensors(tmp_path: Path, form: str) -> None:
    lora = read_lora(saved(tmp_path / "lora.safetensors", WITH_ALPHAS[form] | alphas()))
    assert set(lora.alphas.values()) == {ALPHA}
    assert all(torch.equal(change, TRUE[module]) for module, change in changes(lora).items())


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "transformer.", "diffusion_model.transformer."])
def test_alpha_stands_in_pefts_config(tmp_path: Path, wrapper: str) -> None:
    lora = read_lora(peft(tmp_path, prefixed(wrapper, state_of()), alpha_pattern={f"^{MODULES[0]}": 6}))
    assert lora.alphas == dict(zip(MODULES, (6, ALPHA), strict=True))
    assert lora.state.keys() == state_of().keys()


def test_a_layer_of_the_model_may_have_a_wrappers_name(tmp_path: Path) -> None:
    """Prefixes are stripped until a layer fits."""
    folder = peft(tmp_path, prefixed("diffusion_model.transformer.", state_of()))
    layers = [f"transformer.{module}" for module in MODULES]
    assert set(read_lora(folder, layers=layers).alphas) == set(layers)


def test_without_a_word_alpha_is_the_rank(tmp_path: Path) -> None:
    lora = read_lora(saved(tmp_path / "lora.safetensors", prefixed("transformer.", state_of())))
    assert set(lora.alphas.values()) == {RANK}


def test_the_scale_of_a_rank_stabilised_lora_is_alpha_over_the_root_of_its_rank(tmp_path: Path) -> None:
    read = changes(read_lora(peft(tmp_path, state_of(), use_rslora=True)))
    assert all(torch.equal(change, 2 * TRUE[module]) for module, change in read.items())  # 8/√4 for 8/4


def test_ranks_and_alphas_of_single_modules_are_kept(tmp_path: Path) -> None:
    """In PEFT's patterns: to_q has rank 2 and α 6 there."""
    state = state_of(MODULES[:1], rank=2) | state_of(MODULES[1:])
    lora = read_lora(peft(tmp_path / "peft", state, rank_pattern={"attn.to_q": 2}, alpha_pattern={"attn.to_q": 6}))
    assert lora.ranks == dict(zip(MODULES, (2, 4), strict=True))
    assert lora.alphas == dict(zip(MODULES, (6, 8), strict=True))


# --- writing ---------------------------------------------------------------------------------------------------


def test_what_is_saved_says_rank_and_scale_to_every_tool(tmp_path: Path) -> None:
    """diffusers' file: no α tensors, the scale in B, and the metadata that diffusers reads."""
    save_lora(tmp_path, state_of(), rank=RANK, alpha=ALPHA, targets=["attn.to_q", "attn.to_k"], base="org/base")
    tensors = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    for name, value in state_of().items():
        assert torch.equal(tensors[f"transformer.{name}"], value * (2 if "lora_B" in name else 1))
    assert len(tensors) == len(state_of())
    with safe_open(tmp_path / "pytorch_lora_weights.safetensors", framework="pt") as opened:
        config = json.loads(opened.metadata()[METADATA])
    assert (config["transformer.r"], config["transformer.lora_alpha"]) == (RANK, RANK)
    assert config["transformer.target_modules"] == sorted(MODULES)
    lora = read_lora(tmp_path)
    assert (lora.base, set(lora.alphas.values())) == ("org/base", {ALPHA})
    assert all(torch.equal(lora.state[name], value) for name, value in state_of().items())
    assert lora.facts == f"2 modules, rank {RANK}, alpha {ALPHA}, trained on org/base"


# --- refusals --------------------------------------------------------------------------------------------------


def flux_layer(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    return {f"{name}.lora_up.weight": torch.ones(rows, 2), f"{name}.lora_down.weight": torch.ones(2, columns)}


NAN = {name: value.masked_fill(value == value.max(), float("nan")) for name, value in state_of().items()}
FLUX2_UNKNOWN = flux_layer("double_blocks.0.img_mlp.2", 3072, 9216) | flux_layer("double_blocks.9.what", 18432, 3072)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        pytest.param({}, "no LoRA weights", id="nothing"),
        pytest.param({"transformer.x.weight": torch.ones(1)}, r"transformer\.x\.weight", id="a model"),
        pytest.param(state_of() | {f"{MODULES[0]}.lora_A.old.weight": torch.ones(1)}, "several", id="two adapters"),
        pytest.param(state_of() | {f"{MODULES[0]}.dora_scale": torch.ones(1)}, r"to_q\.dora_scale", id="DoRA"),
        pytest.param(state_of() | {"x.lora_magnitude_vector": torch.ones(1)}, "magnitude_vector", id="PEFT's DoRA"),
        pytest.param(state_of() | {"x.lora_A.bias": torch.ones(1)}, r"x\.lora_A\.bias", id="bias"),
        pytest.param(state_of() | {"x.lora_A.weight": torch.ones(1)}, "x has no lora_B", id="half"),
        pytest.param(state_of() | {"x.alpha": torch.tensor(1.0)}, "x has no lora_A", id="alpha alone"),
        pytest.param(state_of() | {f"{MODULES[0]}.alpha": torch.ones(2)}, r"to_q\.alpha", id="two alphas"),
        pytest.param(state_of() | {f"{MODULES[0]}.lora_A.weight": torch.ones(0, 16)}, r"\[0, 16\]", id="empty"),
        pytest.param(NAN, r"lora_.\.weight of .* NaN", id="NaN"),
        pytest.param({name: value.bfloat16() for name, value in NAN.items()}, "NaN", id="NaN in bf16"),
        pytest.param(prefixed("base_model.model.", state_of()), r"adapter_config\.json", id="no config"),
    ],
)  # fmt: skip
def test_what_is_not_plain_is_refused(tmp_path: Path, tensors: dict[str, Tensor], named: str) -> None:
    with pytest.raises(ValueError, match=rf"lora\.safetensors.*{named}"):
        read_lora(saved(tmp_path / "lora.safetensors", tensors))


@pytest.mark.parametrize(
    ("tensors", "layer", "named"),
    [
        pytest.param(flux_layer("lora_unet_single_blocks_0_linear1", 7, 7), "ff.net.2", "Flux", id="width"),
        pytest.param(flux_layer("lora_unet_double_blocks_0_what", 2, 2), "ff.net.2", "blocks_0_what", id="unknown"),
        pytest.param(flux_layer("lora_unet_input_blocks_1_0", 2, 2), "ff.net.2", "no LoRA of Flux", id="SDXL"),
        pytest.param(FLUX2_UNKNOWN, "ff.linear_in", "double_blocks_9_what", id="unknown of FLUX.2"),
    ],
)
def test_what_diffusers_cannot_translate_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], layer: str, named: str
) -> None:
    with pytest.raises(ValueError, match=rf"lora\.safetensors.*{named}"):
        read_lora(saved(tmp_path / "lora.safetensors", tensors), layers=[f"transformer_blocks.0.{layer}"])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"r": 2}, f"r of .*to_. is 2, and its weights have rank {RANK}"),
        ({"rank_pattern": {"to_q": 3}}, f"r of .*to_q is 3, and its weights have rank {RANK}"),
        ({"lora_alpha": "strong"}, "config"),
        ({"alpha_pattern": {"to_q": None}}, "config"),
    ],
)
def test_a_config_that_is_not_plain_or_contradicts_the_weights_is_refused(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=rf"adapter_.*{named}"):
        read_lora(peft(tmp_path / "peft", state_of(), **config))
    with pytest.raises(ValueError, match=rf"d\.safetensors.*{named}"):
        read_lora(saved(tmp_path / "d.safetensors", prefixed("transformer.", state_of()), **{"lora_alpha": 8} | config))


def test_two_words_on_alpha_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "lora.safetensors", prefixed("transformer.", state_of() | alphas(4.0)), lora_alpha=ALPHA)
    with pytest.raises(ValueError, match=r"α of transformer_blocks\.0\.attn\.to_. is 4 in a tensor and 8"):
        read_lora(file)


def test_two_names_of_one_module_are_refused(tmp_path: Path) -> None:
    state = state_of(("old.to_q", "new.to_q"))
    with pytest.raises(ValueError, match="several adapters"):
        read_lora(saved(tmp_path / "lora.safetensors", state), rename=lambda name: name.replace("old.", "new."))


# --- finding files ---------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of org/zoo in a cache of its own, as a download leaves it; no network is reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot_in(tmp_path / "hub", "org/zoo")


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("org/zoo", "adapter_model.safetensors"),
        ("org/zoo:steps/checkpoint-80", "steps/checkpoint-80/adapter_model.safetensors"),
        ("org/zoo:loras/night.safetensors", "loras/night.safetensors"),
        ("org/zoo:top.safetensors", "top.safetensors"),
    ],
)
def test_a_hub_name_may_name_a_file_or_folder(hub: Path, source: str, file: str) -> None:
    peft(hub, state_of())
    peft(hub / "steps" / "checkpoint-80", state_of())
    saved(hub / "loras" / "night.safetensors", prefixed("transformer.", state_of() | alphas()))
    saved(hub / "top.safetensors", prefixed("transformer.", state_of() | alphas()))
    assert adapter_file(source) == hub / file
    assert set(read_lora(source).alphas.values()) == {ALPHA}


def test_a_mistyped_file_is_no_name_of_the_hub() -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_lora("loras/mistyped.safetensors")
