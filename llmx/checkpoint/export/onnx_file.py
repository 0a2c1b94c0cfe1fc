"""A Hugging Face model as an ONNX graph, checked in ONNX Runtime.

The graph takes whole sequences and gives the outputs of every position; it has no cache of keys and
values. Tried by ``python -m pytest tests/unit/test_export_formats.py``.
"""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.export.compared import compare, load_model, questions, quiet
from llmx.errors import ConfigError

FILE = "model.onnx"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}
EXTERNAL_BYTES = 1 << 30
"""Larger weights lie in a file beside the graph, which may have 2 GiB."""
NOT_COPIED = (".safetensors", ".bin", ".index.json", ".md", ".py")
TRACED = (2, 8)
"""Batch and sequence while it is traced; both stay free in the graph."""


def write_onnx(
    source: Path, target: Path, *, precision: str, trust_remote_code: bool = False
) -> str:
    """Write ``model.onnx`` and what lies beside the weights into ``target``; what the check found.

    Raises:
        ConfigError: the precision, or a model that cannot be written.
        CheckpointError: the file answers otherwise than the model.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"--to onnx --dtype {precision}: ONNX Runtime cannot check it on a CPU. Use --dtype "
            "fp32 or fp16."
        )
    model = load_model(source, trust_remote_code=trust_remote_code)
    names = _inputs_of(model)
    batches = questions(model, names)
    with torch.no_grad(), quiet():
        references = [_output(model, batch) for batch in batches]
    graph = _Graph(model.to(PRECISIONS[precision]))
    traced = tuple(torch.ones(TRACED, dtype=torch.int64) for _ in names)
    free = tuple({0: "batch", 1: "sequence"} for _ in names)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    name = "logits" if references[0].dim() != 3 or hasattr(model, "lm_head") else None
    name = name or ("logits" if model.get_output_embeddings() is not None else "last_hidden_state")
    try:
        with torch.no_grad(), quiet():
            program = torch.onnx.export(
                graph, traced, dynamo=True, dynamic_shapes=free, input_names=list(names),
                output_names=[name], verbose=False,
            )  # fmt: skip
            assert program is not None
            program.save(str(target / FILE), external_data=size > EXTERNAL_BYTES)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{type(model).__name__} cannot be written as ONNX: torch.onnx.export says "
            f"{type(error).__name__}: {lines[0]}. Nothing was left there."
        ) from error
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(NOT_COPIED):
            shutil.copyfile(path, target / path.name)
    del program, graph, model
    return compare(
        batches,
        references,
        _session(target / FILE),
        precision=precision,
        name=f"{FILE} (ONNX Runtime)",
    )


class _Graph(torch.nn.Module):
    """Tensors in, one tensor out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        return _output(self.model, inputs)


def _output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    options = {"use_cache": False} if "use_cache" in _parameters(model) else {}
    output: torch.Tensor = model(**inputs, **options, return_dict=True)[0]
    return output


def _inputs_of(model: Any) -> tuple[str, ...]:
    """Token types of models that tell two texts of a pair apart."""
    pairs = (getattr(model.config, "type_vocab_size", None) or 0) > 1
    return INPUTS if pairs and "token_type_ids" in _parameters(model) else INPUTS[:2]


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def answer(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        values = {name: value.numpy() for name, value in inputs.items()}
        return torch.from_numpy(session.run(None, values)[0])

    return answer
