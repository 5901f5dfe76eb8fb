"""`pacorl serve --backend vllm`: replace this process by vLLM, configured for a judge."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pacorl
from pacorl.io.children import SAFE_PATH

if TYPE_CHECKING:
    from pacorl.models.lora import Lora

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the sizes that vLLM has kernels for
PEFT_CONFIG = "adapter_config.json"
NO_HOST = "nothing.invalid"
"""Invalid host by RFC 6761: vLLM reads an empty list of allowed hosts as all hosts."""
MAX_MODEL_LEN = 8192
"""Tokens of a question and its reasons; two images of 2 megapixels and a long theme fit."""
IMAGES = 4
"""Most images of one question."""


def vllm_command(
    checkpoint: str, name: str, *, host: str = "127.0.0.1", port: int = 8000, extra: Sequence[str] = ()
) -> list[str]:
    """Build the command line. Raises ValueError if vLLM would serve an adapter only in part.

    By default vLLM reads the checkpoint's generation_config.json, like a judge in this process: the repetition penalty
    there (1.05 of Qwen2.5-VL) affects the reasons. Requests set every other sampling parameter.

    Args:
        checkpoint: Folder or hub name of a model, or the folder of a LoRA, whose config names its base.
        name: Name of the model in requests.
    """
    model, served_name, of_adapter = checkpoint, name, []
    folder = Path(checkpoint)
    if (folder / PEFT_CONFIG).is_file() and not (folder / "config.json").is_file():
        lora = read_judge_adapter(folder)
        most = max(lora.ranks.values())
        rank = min((size for size in LORA_RANKS if size >= most), default=most)
        of_adapter = ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1"]
        of_adapter += ["--lora-modules", f"{name}={folder}"]
        model = served_name = lora.base  # the base keeps a name of its own
    command = ["vllm", "serve", model, "--served-model-name", served_name, "--host", host]
    command += ["--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--limit-mm-per-prompt", json.dumps({"image": IMAGES, "video": 0})]
    # Callers send images in data URLs; vLLM would fetch any URL, even inside this network.
    return [*command, "--allowed-media-domains", NO_HOST, *of_adapter, *extra]


def read_judge_adapter(folder: Path) -> Lora:
    """Read an adapter. Raises ValueError if it is damaged, names no base, or vLLM would not apply all of it."""
    from pacorl.models.lora import read_lora  # imported late: torch takes seconds

    lora = read_lora(folder)
    if not lora.base:
        raise ValueError(f"{folder / PEFT_CONFIG}: base_model_name_or_path names no base; write the base's name there")
    vision = [module for module in lora.alphas if "visual." in module]
    if vision:
        raise ValueError(
            f"adapter {folder} changes the vision tower ({vision[0]}), which vLLM would leave out without an error; "
            "merge it into the checkpoint first"
        )
    return lora


def run_vllm(command: list[str], *, api_key: str = "") -> NoReturn:
    """Replace this process by vLLM. Raises ValueError if vLLM is not installed."""
    if shutil.which("vllm") is None:
        raise ValueError(
            "vllm is not on PATH: install it as docs/serve.md shows, or take --backend builtin; or run this where vLLM "
            f"is, with a key in VLLM_API_KEY: {shlex.join(command)}"
        )
    os.execvpe(command[0], command, environment_of(api_key))


def environment_of(api_key: str) -> dict[str, str]:
    """Return the environment of vLLM, with the key: every user of the machine can read command lines."""
    environment = os.environ | SAFE_PATH  # vLLM starts further Python processes
    if api_key:
        environment["VLLM_API_KEY"] = api_key
    # This package's own setting ends a vLLM of several GPUs at its start: they share memory by cudaIpcGetMemHandle,
    # which refuses expandable segments (vllm-project/vllm#42609).
    if environment.get(pacorl.ALLOCATOR[0]) == pacorl.EXPANDABLE:
        del environment[pacorl.ALLOCATOR[0]]
    return environment
