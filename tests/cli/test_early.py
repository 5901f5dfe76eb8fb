"""What a command refuses, it refuses before the libraries that load models are imported: they take seconds."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from pacorl.models.lora import check_layers
from pacorl.models.policies import tiny_spec
from pacorl.types import Size

RECIPE = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SET = ["generate", "--prompt", "red round hero, crown, night", "--panel", "waving, flag", "--panel", "jumping, boat"]
SET += ["--panel", "standing, tree", "--panel", "waving, lamp"]
EDIT = ["generate", "--image", "a.png", "--instruction", "Give the hero a cap."]
SCORE, TRAIN = ["score", "a.png", "b.png", "--judge", "tiny"], ["train-policy", str(RECIPE), "out=run"]
TEACH = ["train-reward", str(RECIPE.parent / "reward/tiny.yaml"), "out=run"]
MISTAKES = [
    (["score", "empty"], "empty is a folder without images"),
    ([*SCORE, "--judge", "nothere"], "there is no nothere"),
    ([*SCORE, "--judge", "empty"], "empty is no checkpoint"),
    ([*SCORE, "--adapter", "nothere"], "no adapter in nothere"),
    ([*SCORE, "--adapter", "lora"], "it has no layer foo"),
    ([*SCORE, "--temperature", "0"], "--temperature 0: it divides"),
    ([*SCORE, "--report", "a.png/page.html"], "a.png: Not a directory"),
    ([*SCORE, "--report", "empty"], "empty: Is a directory"),
    ([*SET, "--model", "nothere"], "there is no nothere"),
    ([*SET, "--adapter", "lora"], "it has no layer foo"),
    ([*SET, "--best-of", "2", "--judge", "nothere"], "there is no nothere"),
    ([*SET, "--size", "33x35"], "the nearest is 32x32"),
    ([*SET, "--lora-scale", "0.5"], "has no LoRA to act on"),
    ([*SET, "--out", "a.png"], "a.png: Not a directory"),
    ([*SET, "--report", "empty"], "empty: Is a directory"),
    ([*SET, "--pdf", "a.png/set.pdf"], "a.png: Not a directory"),
    ([*EDIT, "--image", "b.png"], "has 2 sources, and tiny takes 1"),
    ([*EDIT, "--kind", "flux"], "tiny generates sets and edits no images"),
    ([*TRAIN, "out=a.png/run"], "a.png: Not a directory"),
    ([*TRAIN, "model.checkpoint=nothere"], "there is no nothere"),
    ([*TRAIN, "judge.checkpoint=nothere"], "there is no nothere"),
    ([*TRAIN, "adapter.start=lora"], "it has no layer foo"),
    ([*TRAIN, "prompts.train=tiny:none"], "'tiny:none' is no part of the tiny world"),
    ([*TRAIN, "prompts.train=absent.jsonl"], "absent.jsonl: cannot be read"),
    ([*TRAIN, "sampling.size=[33,35]"], "the nearest is 32x32"),
    ([*TRAIN, "rewards=[{name: nothere}]"], "unknown reward 'nothere'"),
    ([*TRAIN, "trackers=[wandb]"], "trackers: the package wandb is not installed"),
    ([*TRAIN, "sampling.batch=7"], "72 samples an epoch do not divide"),
    ([*TRAIN, "out=ran"], "ran holds a run already; go on with --resume auto"),
    ([*TRAIN, "out=ran", "--resume", "nothere"], "ran holds a run already"),
    ([*TRAIN, "--resume", "nothere"], "--resume nothere is not a checkpoint"),
    ([*TEACH, "out=a.png/run"], "a.png: Not a directory"),
    ([*TEACH, "out=ran"], "ran holds a run already; go on with --resume auto"),
    ([*TEACH, "trackers=[wandb]"], "trackers: the package wandb is not installed"),
    ([*TEACH, "tuning.start=lora"], "it has no layer foo"),
    ([*TEACH, "data.train=[absent.jsonl]"], "absent.jsonl: cannot be read"),
    ([*TEACH, "data.evaluation=[absent]"], "absent: no such source"),
    ([*TRAIN, "optimizer.lr=1e300"], "optimizer.lr: Input should be less than or equal to 1"),
    (["quickstart", "--out", "a.png"], "a.png: Not a directory"),
    (["quickstart", "model.checkpoint=nothere"], "there is no nothere"),
    (["quickstart", "nokey=3"], "nokey: unknown key"),
    (["benchmark", "consistency-rank", "empty", "--judge", "tiny"], "empty/images is missing"),
    (["benchmark", "consistency-rank", "rank", "--judge", "nothere"], "there is no nothere"),
    (["benchmark", "t2is", "empty"], "name a generator with --model"),
    (["benchmark", "t2is", "empty", "--images", "nothere"], "--images nothere: there is no such folder"),
    (["serve", "nothere"], "there is no nothere"),
    (["serve", "tiny", "--adapter", "name=lora"], "it has no layer foo"),
    (["studio", "--judge", "nothere"], "there is no nothere"),
    (["studio", "--history", "a.png"], "a.png: Not a directory"),
]
RUNS = """
import contextlib, io, json, sys
from pacorl import cli
sys.modules["wandb"] = None  # as if it were not installed
for words in json.load(sys.stdin):
    sys.argv, said = ["pacorl", *words], io.StringIO()
    code = None
    with contextlib.redirect_stderr(said):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    loaded = sorted({"diffusers", "transformers", "peft", "accelerate"} & set(sys.modules))
    print(json.dumps([code, said.getvalue(), loaded]))
"""


@pytest.mark.slow
def test_mistakes_are_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (32, 32)).save(tmp_path / name)
    write_adapter(tmp_path / "lora", "foo", width=8)
    (tmp_path / "ran").mkdir()
    (tmp_path / "ran" / "metrics.jsonl").write_text("{}\n")
    write_ranking(tmp_path / "rank")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        mistakes = [*MISTAKES, (["serve", "tiny", "--port", port], f"127.0.0.1:{port} cannot be listened on")]
        done = subprocess.run(
            [sys.executable, "-c", RUNS],
            cwd=tmp_path,
            input=json.dumps([words for words, _ in mistakes]),
            capture_output=True,
            text=True,
            check=True,
        )
    for (words, message), line in zip(mistakes, done.stdout.splitlines(), strict=True):
        code, said, loaded = json.loads(line)
        assert (code, loaded) == (1, []), (words, said)
        assert message in said, words
        assert said.count("\n") == 1, said


def write_ranking(folder: Path) -> None:
    """ConsistencyRank-Bench with one ranking of two images."""
    names = ["0_0.png", "0_1.png", "1_1.png"]
    (folder / "images" / "0000").mkdir(parents=True)
    for name in names:
        Image.new("RGB", (32, 32)).save(folder / "images" / "0000" / name)
    order = {"comp_images": names[1:], "rank_images": names[1:]}
    rows = {
        "prompt_data.jsonl": {"idx": "0000", "prompt": "a cat", "criteria": {}, "category": "Character"},
        "consistency_full_rank.jsonl": {"folder": "0000", "ref_image": names[0], **order},
    }
    for name, row in rows.items():
        (folder / name).write_text(json.dumps(row) + "\n")


def write_adapter(folder: Path, layer: str, *, width: int) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [layer], "base_model_name_or_path": "X"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    sides = {"A": torch.zeros(4, width), "B": torch.zeros(width, 4)}
    names = {f"base_model.model.{layer}.lora_{side}.weight": value for side, value in sides.items()}
    save_file(names, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_of_another_size_is_seen_in_the_files_headers(tmp_path: Path) -> None:
    spec, layer = tiny_spec(edits=False), "single_transformer_blocks.0.attn.to_k"
    spec.check_source("tiny", adapter=str(write_adapter(tmp_path / "fits", layer, width=128)))
    with pytest.raises(ValueError, match=f"it has 64 where {layer} has 128"):
        spec.check_source("tiny", adapter=str(write_adapter(tmp_path / "other", layer, width=64)))


def test_a_checkpoint_that_is_half_here_says_nothing_of_an_adapter(tmp_path: Path) -> None:
    shutil.copytree(tiny_spec(edits=False).committed.folder, tmp_path / "model", copy_function=os.symlink)
    adapter = str(write_adapter(tmp_path / "other", "foo", width=8))
    with pytest.raises(ValueError, match="it has no layer foo"):
        check_layers(adapter, str(tmp_path / "model"), component="transformer")
    index = tmp_path / "model/transformer/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"foo.weight": "absent.safetensors"}}))
    check_layers(adapter, str(tmp_path / "model"), component="transformer")


def test_the_sizes_are_those_that_the_loaded_policy_takes() -> None:
    spec = tiny_spec(edits=False)
    policy = spec.from_pretrained("tiny")
    for size in (Size(64, 56), Size(64, 60), Size(64, 64)):
        assert fault(policy.check_size, size) == fault(lambda size: spec.check_source("tiny", size=size), size)


def fault(check: Callable[[Size], object], size: Size) -> str:
    try:
        check(size)
    except ValueError as error:
        return str(error)
    return ""
