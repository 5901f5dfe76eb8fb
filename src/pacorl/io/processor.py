"""The processor of a Qwen2-VL-family judge: tokenizer, image processor and chat template, but no video processor.

transformers' own processors insist on a video processor, which needs torchvision; a judge never sees a video, so it
is left out, and images are prepared by the PIL backend.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.processing_utils import ProcessorMixin
from transformers.utils import cached_file

from pacorl.io.documents import read_object
from pacorl.io.pretrained import pretrained
from pacorl.types import Size


class ImageTextProcessor(Qwen2_5_VLProcessor):  # type: ignore[misc]
    """`Qwen2_5_VLProcessor` without videos; saves and loads like it."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        # Qwen2_5_VLProcessor's own initializer without its demand for a video processor.
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def image_tokens(image: Size, options: Mapping[str, Any]) -> int:
    """Count the tokens of an image in a question, as Qwen2-VL's image processor with these options resizes it."""
    side = options["patch_size"] * options["merge_size"]
    # transformers saves the bounds as `size` today; published checkpoints have the older names.
    bounds = options.get("size", {})
    height, width = smart_resize(
        image.height,
        image.width,
        factor=side,
        min_pixels=options.get("min_pixels") or bounds["shortest_edge"],
        max_pixels=options.get("max_pixels") or bounds["longest_edge"],
    )
    return int(height // side) * int(width // side)


def load_processor(source: str | Path, **hub: Any) -> ImageTextProcessor:
    """Load the processor of a checkpoint folder or hub name, from today's or older files."""
    # Tokenizer and image processor by themselves: AutoProcessor would ask for videos.
    tokenizer = pretrained(AutoTokenizer, source, **hub)
    image_processor = pretrained(Qwen2VLImageProcessorPil, source, **hub)
    template = tokenizer.chat_template  # includes a file chat_template.jinja
    # The processor's own older file wins, as in transformers.
    path = cached_file(source, "chat_template.json", _raise_exceptions_for_missing_entries=False, **hub)
    if path:
        template = str(read_object(Path(path)).get("chat_template") or template)
    if not template:
        raise ValueError(f"{source} has no chat template, so no question can be put to it; is it a chat model?")
    return ImageTextProcessor(image_processor=image_processor, tokenizer=tokenizer, chat_template=template)
