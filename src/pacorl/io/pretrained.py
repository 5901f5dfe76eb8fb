"""The only call of transformers' and diffusers' `from_pretrained`: a checkpoint is data, and runs no code.

    model = pretrained(AutoModelForImageTextToText, "folder-or-hub-name", dtype=torch.bfloat16)

Python files of a checkpoint are neither run nor asked about, and weights are read from safetensors alone, since a
pickle can run code. A library's refusal for these reasons becomes one line. One reward loads weights by itself, the
aesthetic head (`rewards.clip`).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacorl.io.files import safetensors_errors

LIBRARIES = ("diffusers", "transformers")
"""Libraries that the components of a pipeline may come from."""
FIX = "convert it, or name another checkpoint"
NO_SAFETENSORS = re.compile(r"no file named \S*safetensors|cannot be loaded with `safetensors`|named \S*safetensors\.$")
"""Messages about absent weights, but not about one absent file of several."""


def pretrained(kind: Any, source: str | Path, **options: Any) -> Any:
    """Load a model, tokenizer, processor, config or pipeline.

    Args:
        kind: A class of transformers or diffusers.
        source: A checkpoint folder or hub name.
        options: Options of the class's own `from_pretrained`.

    Raises:
        ValueError: The checkpoint needs Python code of its own, has no safetensors, or is of an unknown or damaged
            form.
        OSError: There is no such checkpoint.
    """
    from transformers import dynamic_module_utils

    # Seconds that transformers waits for an answer to "Do you wish to run the custom code?", which it asks wherever
    # `trust_remote_code` is not passed on: a processor does not, nor does a pipeline. At 0 it refuses instead.
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0

    families = {base.__name__ for base in kind.__mro__}
    if "DiffusionPipeline" in families:
        for component, entry in kind.load_config(source).items():
            # A setting, an absent component, or one among the options, which is not loaded.
            if component in options or not isinstance(entry, list) or [type(word) for word in entry] != [str, str]:
                continue
            library, name = entry
            # AutoModel and its like would choose a class by the component's own files.
            if library not in LIBRARIES or re.match("Auto[A-Z]", name):
                raise ValueError(
                    f"{source}: its model_index.json names {library}.{name} as {component}, and a component is a "
                    f"model class of {' or '.join(LIBRARIES)}; {FIX}"
                )
    if families & {"DiffusionPipeline", "PreTrainedModel", "_BaseAutoModelClass"}:
        options["use_safetensors"] = True

    try:
        with safetensors_errors(source):
            return kind.from_pretrained(source, trust_remote_code=False, **options)
    except (ValueError, OSError) as error:
        # Libraries advise options that are not offered here, so their text is replaced.
        if "trust_remote_code" in str(error):
            reason = "needs Python code of its own, and no code of a checkpoint is run"
        elif NO_SAFETENSORS.search(str(error)):
            reason = "has no weights as safetensors, and pickled ones (.bin, .pt) are not read: they could run code"
        else:
            raise
        raise ValueError(f"{source} {reason}; {FIX}") from None


def model_of(config: Mapping[str, Any], **overrides: Any) -> Any:
    """Build a model with random weights from its config.json, which names the class of diffusers or transformers."""
    import diffusers
    import transformers

    # diffusers names the class in the config, transformers the architecture.
    options = {**config, **overrides}
    if "_class_name" in options:
        return getattr(diffusers, options["_class_name"]).from_config(options)
    (architecture,) = options.pop("architectures")
    return getattr(transformers, architecture)(transformers.AutoConfig.for_model(options.pop("model_type"), **options))
