"""Where a completion ends, in one place for evaluation, the command ``generate``, the final model
and every export.

A tokenizer has one EOS token, and a chat template may close an assistant's turn with another
(``<|im_end|>``); a pretrained model may name more (Llama 3: three). All of them go to
``eos_token_id`` of ``generation_config.json``, which ``generate()`` of Transformers, vLLM and
others read. ``cat RUN_DIR/model/generation_config.json`` shows it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from llmx.config import ModelConfig

FILE = "generation_config.json"


def keep_generation_config(model: Any, source: ModelConfig) -> None:
    """Give ``model`` the generation config that was published with its weights, if there is one.

    A model that is built from its config alone has lost it, and with it some of its stop tokens.
    """
    from transformers import GenerationConfig

    assert source.path is not None
    try:
        published = GenerationConfig.from_pretrained(
            str(Path(source.path).expanduser()), revision=source.revision or "main"
        )
    except (OSError, ValueError):  # most models of research have none
        return
    model.generation_config = published


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a completion of ``model``, sorted: those of the tokenizer and its chat
    template, and what the model's own generation config names besides.

    Of the latter, ids that are ordinary text in this tokenizer are left out: it is not the one
    that the model was published with.
    """
    from llmx.data import stop_token_ids

    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = {own} if isinstance(own, int) else set(own or ())
    known = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    return tuple(sorted({*stop_token_ids(tokenizer), *(named & known)}))


def exported_generation_config(model: Any, config: Any, *, tokenizer: Any) -> Any:
    """What is written beside the weights: the model's own, with every stop token."""
    from transformers import GenerationConfig

    generation = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(generation, name, None) is None:
            setattr(generation, name, getattr(config, name, None))
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    stops = list(stop_ids(model, tokenizer))
    if stops:
        generation.eos_token_id = stops if len(stops) > 1 else stops[0]
    generation.use_cache = True
    # Transformers 4 makes one that it takes for derived anew from config.json, where there is only
    # one stop token.
    generation._from_model_config = False
    return generation


def write_generation_config(directory: Path, model: Any, config: Any, *, tokenizer: Any) -> None:
    """Write ``generation_config.json``. Its values are not judged: published configs hold some
    that ``save_pretrained`` would refuse (Llama 2: a temperature without sampling)."""
    generation = exported_generation_config(model, config, tokenizer=tokenizer)
    generation.to_json_file(directory / FILE, use_diff=True, keys_to_pop=["compile_config"])
