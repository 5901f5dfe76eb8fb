"""What LoRA files say is read as it is meant, strength included, and what cannot be read is refused with the reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pacorl.models.lora.adapters import adapter_state, add_lora, load_lora, start_from
from pacorl.models.lora.formats import METADATA, Lora, adapter_file, read_lora, save_lora, write_lora
from pacorl.models.policies.flux import tiny_flux_transformer

MODULES = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k")
WIDTH, RANK, ALPHA = 16, 4, 8


def state_of(modules: tuple[str, ...] = MODULES, *, rank: int = RANK) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"A": (rank, WIDTH), "B": (WIDTH, rank)}
    return {f"{module}.lora_{side}.weight": torch.randn(shapes[side]) for module in modules for side in shapes}


def changes(lora: Lora) -> dict[str, Tensor]:
    """What the adapter adds to each weight."""
    return {
        module: lora.alphas[module]
        / rank
        * (lora.state[f"{module}.lora_B.weight"] @ lora.state[f"{module}.lora_A.weight"])
        for module, rank in lora.ranks.items()
    }


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


def down_up(tensors: Mapping[str, Tensor], down: str = "lora_down", up: str = "lora_up") -> dict[str, Tensor]:
    return {name.replace("lora_A", down).replace("lora_B", up): value for name, value in tensors.items()}


def peft(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """A folder as PEFT saves it."""
    saved(folder / "adapter_model.safetensors", prefixed("base_model.model.", tensors))
    document = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["to_q", "to_k"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(prefixed("transformer.", state_of() | alphas()), id="diffusers with alphas"),
        pytest.param(state_of() | alphas(), id="no prefix"),
        pytest.param(prefixed("transformer.", down_up(state_of()) | alphas()), id="down and up"),
        pytest.param(prefixed("transformer.", down_up(state_of(), "lora.down", "lora.up") | alphas()), id="dots"),
        pytest.param(prefixed("diffusion_model.", state_of() | alphas()), id="diffusion_model, A and B"),
        pytest.param(
            {name.replace(".weight", ".default.weight"): value for name, value in state_of().items()} | alphas(),
            id="default",
        ),
    ],
)
def test_alpha_stands_in_tensors(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    lora = read_lora(saved(tmp_path / "lora.safetensors", tensors))
    assert set(lora.alphas.values()) == {ALPHA}
    assert all(torch.equal(change, TRUE[module]) for module, change in changes(lora).items())


def test_alpha_stands_in_the_metadata(tmp_path: Path) -> None:
    """diffusers from 0.34 on writes it there and no tensors."""
    file = saved(tmp_path / "lora.safetensors", prefixed("transformer.", state_of()), r=RANK, lora_alpha=ALPHA)
    assert set(read_lora(file).alphas.values()) == {ALPHA}


def test_without_a_word_alpha_is_the_rank(tmp_path: Path) -> None:
    lora = read_lora(saved(tmp_path / "lora.safetensors", prefixed("transformer.", state_of())))
    assert set(lora.alphas.values()) == {RANK}


def test_ranks_and_alphas_of_single_modules_are_kept(tmp_path: Path) -> None:
    """In PEFT's patterns: to_q has rank 2 and α 6 there."""
    state = state_of(MODULES[:1], rank=2) | state_of(MODULES[1:])
    folder = peft(tmp_path / "peft", state, rank_pattern={"attn.to_q": 2}, alpha_pattern={"attn.to_q": 6})
    lora = read_lora(folder)
    assert (lora.ranks, lora.alphas) == (
        dict(zip(MODULES, (2, 4), strict=True)),
        dict(zip(MODULES, (6, 8), strict=True)),
    )
    write_lora(tmp_path / "again", lora)
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        again = read_lora(tmp_path / "again" / name)
        assert (again.ranks, again.alphas) == (lora.ranks, lora.alphas)
        assert all(torch.equal(again.state[key], value) or "lora_B" in key for key, value in state.items())
        torch.testing.assert_close(changes(again), changes(lora), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["lora_unet_single_blocks_3_linear1", "diffusion_model.single_blocks.3.linear1"])
def test_a_single_block_of_flux_is_split_at_its_width(tmp_path: Path, prefix: str) -> None:
    """Its q, k, v and MLP are one matrix of 3 · 3072 + 12288 rows with one A."""
    torch.manual_seed(0)
    up, down = torch.randn(21504, 4), torch.randn(4, 3072)
    tensors = {f"{prefix}.lora_up.weight": up, f"{prefix}.lora_down.weight": down, f"{prefix}.alpha": torch.tensor(8.0)}
    lora = read_lora(saved(tmp_path / "kohya.safetensors", tensors))
    block = "single_transformer_blocks.3"
    modules = [f"{block}.attn.to_q", f"{block}.attn.to_k", f"{block}.attn.to_v", f"{block}.proj_mlp"]
    assert sorted(lora.alphas) == sorted(modules)
    added = changes(lora)
    for module, rows in zip(modules, up.split([3072, 3072, 3072, 12288]), strict=True):
        assert torch.equal(added[module], 2 * (rows @ down))


FLUX2_BLOCK = {
    "single_blocks.3.linear1": ("single_transformer_blocks.3.attn.to_qkv_mlp_proj", 27648, 3072),
    "single_blocks.3.linear2": ("single_transformer_blocks.3.attn.to_out", 3072, 12288),
    "double_blocks.1.img_mlp.0": ("transformer_blocks.1.ff.linear_in", 18432, 3072),
    "double_blocks.1.txt_mlp.2": ("transformer_blocks.1.ff_context.linear_out", 3072, 9216),
    "double_blocks.1.txt_attn.proj": ("transformer_blocks.1.attn.to_add_out", 3072, 3072),
}
"""Its authors' name → diffusers' name, rows and columns at FLUX.2-klein's width."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [*(pytest.param(form, marks=pytest.mark.campaign) for form in ("lora_unet_", "diffusion_model.")), ""]
)
def test_a_file_of_flux_2_is_told_by_its_shapes(tmp_path: Path, form: str) -> None:
    """Its layers have FLUX.1's names, and a fused MLP of another width."""
    torch.manual_seed(0)
    tensors, true = {}, {}
    for name, (module, rows, columns) in FLUX2_BLOCK.items():
        up, down = torch.randn(rows, 2), torch.randn(2, columns)
        key = form + (name.replace(".", "_") if form == "lora_unet_" else name)
        sides = ("up", "down") if form == "lora_unet_" else ("B", "A")
        tensors |= {f"{key}.lora_{side}.weight": value for side, value in zip(sides, (up, down), strict=True)}
        tensors |= {f"{key}.alpha": torch.tensor(4.0)}
        true[module] = 2 * (up @ down)
    added = changes(read_lora(saved(tmp_path / "flux2.safetensors", tensors)))
    assert added.keys() == true.keys()
    assert all(torch.equal(added[module], true[module]) for module in true)


def test_a_layer_of_flux_2_that_would_be_left_out_is_named(tmp_path: Path) -> None:
    layers = {"double_blocks.0.img_mlp.2": (3072, 9216), "double_stream_modulation_img.lin": (18432, 3072)}
    tensors = {}
    for name, (rows, columns) in layers.items():
        tensors |= {f"diffusion_model.{name}.lora_B.weight": torch.randn(rows, 2)}
        tensors |= {f"diffusion_model.{name}.lora_A.weight": torch.randn(2, columns)}
    with pytest.raises(ValueError, match=r"FLUX\.2 does not know lora_unet_double_stream_modulation_img_lin"):
        read_lora(saved(tmp_path / "flux2.safetensors", tensors))


def test_xlabs_names_are_read(tmp_path: Path) -> None:
    """`double_blocks.0.processor.qkv_lora1.down.weight`, α the rank."""
    torch.manual_seed(0)
    key = "double_blocks.0.processor.qkv_lora1"
    up, down = torch.randn(48, 4), torch.randn(4, WIDTH)
    tensors = {f"{key}.up.weight": up, f"{key}.down.weight": down}
    added = changes(read_lora(saved(tmp_path / "xlabs.safetensors", tensors)))
    for letter, rows in zip("qkv", up.split(16), strict=True):
        assert torch.equal(added[f"transformer_blocks.0.attn.to_{letter}"], rows @ down)


def test_what_earlier_versions_saved_is_read(tmp_path: Path) -> None:
    """α tensors under the prefix, and PEFT's config beside, which is of another file."""
    folder = peft(tmp_path, state_of(), lora_alpha=1000)
    file = saved(folder / "pytorch_lora_weights.safetensors", prefixed("transformer.", state_of() | alphas()))
    assert set(read_lora(file).alphas.values()) == {ALPHA}


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
    for file in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        lora = read_lora(tmp_path / file)
        assert set(lora.alphas.values()) == {ALPHA}
        assert all(torch.equal(lora.state[name], value) for name, value in state_of().items())
    assert read_lora(tmp_path).base == "org/base"


SAVE = """
import sys, torch
from pathlib import Path
from pacorl.models.lora.formats import save_lora
state = {f"x.y.lora_{side}.weight": torch.ones(shape) for side, shape in {"A": (2, 4), "B": (4, 2)}.items()}
for number in range(4):
    save_lora(Path(sys.argv[1], str(number)), state, rank=2, alpha=4, targets=["y"])
"""


def test_equal_weights_are_equal_bytes_in_every_process(tmp_path: Path) -> None:
    """safetensors' writer orders metadata by a hash that each process and each call draws anew."""
    for process in ("one", "two"):
        subprocess.run([sys.executable, "-c", SAVE, tmp_path / process], check=True)
    files = sorted(tmp_path.glob("*/*/pytorch_lora_weights.safetensors"))
    assert len(files) == 8
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], framework="pt") as opened:
        assert json.loads(opened.metadata()[METADATA])["transformer.r"] == 2
        assert torch.equal(opened.get_tensor("transformer.x.y.lora_B.weight"), torch.full((4, 2), 2.0))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"transformer.x.weight": torch.zeros(1)}, "holds no LoRA weights"),
        (state_of() | {"lora_te1_a.lora_up.weight": torch.zeros(1)}, "changes the text encoder as well"),
        (state_of() | {f"{MODULES[0]}.dora_scale": torch.zeros(1)}, r"to_q\.dora_scale is no weight of a plain LoRA"),
        (state_of() | {"x.lora_A.bias": torch.zeros(1)}, r"x\.lora_A\.bias is no weight of a plain LoRA"),
        (state_of() | {"x.lora_A.weight": torch.zeros(1)}, r"x\.lora_A\.weight is there and x\.lora_B\.weight is not"),
        (state_of() | {"x.alpha": torch.tensor(1.0)}, r"x\.alpha belongs to no weights"),
        (prefixed("base_model.model.", state_of()), r"has PEFT's names and no adapter_config\.json beside it"),
        (
            {f"lora_unet_single_blocks_0_linear1.lora_{side}.weight": torch.zeros(7, 7) for side in ("up", "down")},
            "has 7 rows, and diffusers' converter splits FLUX.1's 21504 only",
        ),
        (
            {f"lora_unet_double_blocks_0_what.lora_{side}.weight": torch.zeros(2, 2) for side in ("up", "down")},
            "diffusers' converter of FluxLoraLoaderMixin cannot read it: Incompatible keys",
        ),
    ],
)
def test_what_is_not_plain_is_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_lora(saved(tmp_path / "lora.safetensors", tensors))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"use_rslora": True}, "use_rslora is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4 is set"),
    ],
)
def test_other_kinds_are_refused_by_their_config(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_lora(peft(tmp_path / "peft", state_of(), **config))
    with pytest.raises(ValueError, match=message):
        read_lora(saved(tmp_path / "d.safetensors", prefixed("transformer.", state_of()), lora_alpha=8, **config))


def test_two_words_on_alpha_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "lora.safetensors", prefixed("transformer.", state_of() | alphas(4.0)), lora_alpha=ALPHA)
    with pytest.raises(
        ValueError, match=r"α of transformer_blocks\.0\.attn\.to_. is 4 in a tensor and 8 in its config"
    ):
        read_lora(file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    state = {name: weight.clone().to(dtype) for name, weight in state_of().items()}
    name = sorted(state)[-1]
    state[name].view(-1)[-1] = value
    with pytest.raises(
        ValueError, match=rf"lora\.safetensors: {re.escape(name)} holds NaN or an infinity; its training"
    ):
        read_lora(saved(tmp_path / "lora.safetensors", state))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    file = saved(tmp_path / "lora.safetensors", state_of())
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"lora\.safetensors: its weights are damaged or cut off"):
        read_lora(file)
    folder = peft(tmp_path / "peft", state_of())
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json:1: not valid JSON .*; fetch the adapter again"):
        read_lora(folder)


@pytest.mark.parametrize("config", [{"lora_alpha": "strong"}, {"lora_alpha": [8]}, {"alpha_pattern": {"to_q": None}}])
def test_an_alpha_that_is_no_number_is_named_with_its_file(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: lora_alpha or alpha_pattern in its config: "):
        read_lora(peft(tmp_path / "peft", state_of(), **config))
    with pytest.raises(ValueError, match=r"a\.safetensors: .*to_q\.alpha must be one number, and has 2"):
        read_lora(saved(tmp_path / "a.safetensors", state_of() | {f"{MODULES[0]}.alpha": torch.ones(2)}))


def test_a_weight_without_numbers_is_named(tmp_path: Path) -> None:
    state = {name: value[:0] if "lora_A" in name else value[:, :0] for name, value in state_of().items()}
    with pytest.raises(ValueError, match=r"a\.safetensors: .*lora_[AB]\.weight is empty"):
        read_lora(saved(tmp_path / "a.safetensors", state))


def test_an_adapter_that_does_not_fit_is_named(tmp_path: Path) -> None:
    model = tiny_flux_transformer()
    a, b = torch.ones(2, model.get_submodule(MODULES[0]).in_features), torch.ones(3, 2)
    weights = {f"{MODULES[0]}.lora_A.weight": a, f"{MODULES[0]}.lora_B.weight": b}
    file = saved(tmp_path / "a.safetensors", weights)
    with pytest.raises(ValueError, match=rf"^{file}: .* is \(3, 2\)"):
        load_lora(model, file)


# --- finding files ---------------------------------------------------------------------------------------------


def test_a_file_of_any_name_is_found_if_it_is_alone(tmp_path: Path) -> None:
    file = saved(tmp_path / "my-lora_v3.safetensors", state_of())
    assert adapter_file(tmp_path) == file
    saved(tmp_path / "other.safetensors", state_of())
    with pytest.raises(ValueError, match=r"holds my-lora_v3\.safetensors, other\.safetensors; name the one"):
        adapter_file(tmp_path)
    assert adapter_file(tmp_path / "other.safetensors").name == "other.safetensors"


def test_where_there_is_none_the_message_says_what_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")  # whoever opened it would wait for ever
    with pytest.raises(ValueError, match=r"it holds pipe\.safetensors"):
        adapter_file(tmp_path)
    (tmp_path / "pipe.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither adapter_model\.safetensors nor .* \(it holds nothing\)"):
        adapter_file(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"it holds notes\.txt.*ORG/NAME:FOLDER/FILE"):
        adapter_file(tmp_path)
    with pytest.raises(ValueError, match="there is no such file or folder"):
        adapter_file(tmp_path / "nowhere")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of org/zoo in a cache of its own, as a download leaves it; no network is reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "models--org--zoo"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    return repo / "snapshots" / ("0" * 40)


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


# --- going on from one -----------------------------------------------------------------------------------------


def test_a_start_reads_alpha_from_the_metadata_and_advises_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformer = tiny_flux_transformer(width=64, heads=2, double_blocks=1, single_blocks=1)
    add_lora(transformer, rank=RANK, alpha=ALPHA, targets=["attn.to_q"])
    state = {name: torch.randn_like(value) for name, value in adapter_state(transformer).items()}
    file = saved(tmp_path / "lora.safetensors", prefixed("transformer.", state), r=RANK, lora_alpha=ALPHA)
    start_from(transformer, file, rank=RANK, alpha=ALPHA, base="")
    assert all(torch.equal(value, state[name]) for name, value in adapter_state(transformer).items())
    with pytest.raises(ValueError, match=r"has rank 4 and alpha 8; set adapter\.alpha=8$"):
        start_from(transformer, file, rank=RANK, alpha=RANK, base="")


def test_a_start_of_several_ranks_is_refused(tmp_path: Path) -> None:
    state = state_of(MODULES[:1], rank=2) | state_of(MODULES[1:])
    folder = peft(tmp_path, state, rank_pattern={"attn.to_q": 2})
    with pytest.raises(ValueError, match="has modules of ranks 2, 4, and training takes one for all"):
        start_from(torch.nn.Linear(1, 1), folder, rank=RANK, alpha=ALPHA, base="")


def test_an_adapter_of_the_last_layer_alone_stays_there(tmp_path: Path) -> None:
    """`proj_out` is also the end of the name of a layer in every single block."""
    transformer = tiny_flux_transformer(width=64, heads=2, double_blocks=1, single_blocks=1)
    shapes = {"A": (RANK, 64), "B": (transformer.proj_out.out_features, RANK)}
    lora = Lora(
        {f"proj_out.lora_{side}.weight": torch.ones(shape) for side, shape in shapes.items()}, {"proj_out": 4.0}
    )
    write_lora(tmp_path, lora)
    (line,) = load_lora(transformer, tmp_path)
    assert line == f"LoRA {tmp_path}: PEFT form, 1 modules, rank {RANK}, alpha 4"
    assert sorted(adapter_state(transformer)) == sorted(lora.state)


def test_what_an_adapter_is_fits_in_a_line(tmp_path: Path) -> None:
    """The converter of a kohya file folds α into the weights."""
    block = "lora_unet_transformer_blocks_0_attn_to_q"
    tensors = {f"{block}.lora_up.weight": torch.randn(8, 2), f"{block}.lora_down.weight": torch.randn(2, 8)}
    save_file(tensors | {f"{block}.alpha": torch.tensor(1.0)}, tmp_path / "night.safetensors")
    assert read_lora(tmp_path / "night.safetensors").facts == "kohya form, 1 modules, rank 2, alpha 2"
    state = {f"{name}.lora_{side}.weight": torch.zeros(2, 2) for name in "xy" for side in "AB"}
    write_lora(tmp_path / "peft", Lora(state, {"x": 4.0, "y": 2.0}, "org/base"))
    facts = "PEFT form, 2 modules, rank 2, alpha 2 to 4, trained on org/base"
    assert read_lora(tmp_path / "peft").facts == facts
    assert read_lora(tmp_path / "peft" / "pytorch_lora_weights.safetensors").facts.startswith("diffusers form, 2")
