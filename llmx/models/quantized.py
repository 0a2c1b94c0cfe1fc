"""Linear layers whose frozen weights are kept in 4 bits (QLoRA), by ``bitsandbytes``.

A layer is quantized when its weight is read, so that the model is never whole in 16 bits on its
device. Its packed weight is no parameter: DeepSpeed neither casts, broadcasts nor shards it. Each
use dequantizes the layer anew and multiplies in the dtype of the run, in training, in an evaluation
and in a merged model alike. Shown by ``python -m pytest tests/unit/test_models_quantized.py``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmx.config import AdapterConfig
from llmx.config.model_rules import matching
from llmx.errors import ConfigError
from llmx.models.parameters import output_embedding

BLOCK = 64
"""Weights that share a scale."""


@dataclass(frozen=True)
class Quantization:
    """The format of weights in 4 bits."""

    kind: str
    """``nf4`` or ``fp4``."""
    double: bool
    """The scales are quantized, too."""

    @classmethod
    def of(cls, adapter: AdapterConfig) -> Quantization | None:
        """The format that ``adapter.quantize`` names; None for ``none``."""
        if adapter.kind == "none" or adapter.quantize == "none":
            return None
        return cls(adapter.quantize, adapter.double_quant)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Quantization:
        """The format that the values of ``describe`` say."""
        return cls(values["bnb_4bit_quant_type"], values["bnb_4bit_use_double_quant"])

    def describe(self, network: nn.Module, *, dtype: torch.dtype) -> dict[str, Any]:
        """The values of transformers' ``BitsAndBytesConfig`` that load the base of an adapter as it
        was trained."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "llm_int8_skip_modules": [
                name.replace(".base_layer", "")
                for name, module in network.named_modules()
                if type(module) is nn.Linear and ".lora_" not in name
            ],
        }


def _functional() -> Any:
    try:
        import bitsandbytes.functional
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"adapter.quantize needs the package bitsandbytes, which cannot be imported here "
            f"({error}). Run `pip install llmx[qlora]` in the Python of every host."
        ) from error
    return bitsandbytes.functional


def pack(weight: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, Any]:
    """The packed weight and its scales, on the device of ``weight``."""
    packed, state = _functional().quantize_4bit(
        weight.contiguous(),
        blocksize=BLOCK,
        compress_statistics=quantization.double,
        quant_type=quantization.kind,
    )
    return packed, state


def unpack(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The weight, in the dtype that it was packed from."""
    weight: torch.Tensor = _functional().dequantize_4bit(packed, state)
    return weight


@torch.no_grad()
def rounded(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """A weight as a quantized layer multiplies with it. Computed on the GPU where there is one, as
    training does."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return unpack(*pack(weight.to(device), quantization)).to(weight.device)


def is_quantized(name: str, module: nn.Module, description: dict[str, Any]) -> bool:
    """Whether this layer of a plain network is one that training kept in 4 bits."""
    return type(module) is nn.Linear and name not in description["llm_int8_skip_modules"]


def trained_dtype(description: dict[str, Any]) -> torch.dtype:
    """The dtype that weights were packed from."""
    dtype: torch.dtype = getattr(torch, description["bnb_4bit_compute_dtype"])
    return dtype


def round_layers(network: nn.Module, description: dict[str, Any]) -> None:
    """Give a plain network the weights that training has multiplied with.

    Args:
        description: of ``Quantization.describe``.
    """
    quantization, dtype = Quantization.read(description), trained_dtype(description)
    for name, module in network.named_modules():
        if is_quantized(name, module, description):
            weight: torch.Tensor = module.weight.data
            weight.copy_(rounded(weight.to(dtype), quantization))


class _Product(torch.autograd.Function):
    """``inputs @ weight.T + bias``; the weight is unpacked again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(inputs, layer.weight.to(inputs.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.layer.weight.to(gradients[0].dtype), None


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in 4 bits; its bias is as ever."""

    def __init__(
        self, weight: torch.Tensor, bias: nn.Parameter | None, quantization: Quantization
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.quantization = quantization
        self.register_parameter("bias", bias)
        self.packed, self._state = pack(weight, quantization)
        """Two weights in a byte; the scales."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Unpacked: a new tensor each time."""
        return unpack(self.packed, self._state)

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    @property
    def packed_tensors(self) -> list[torch.Tensor]:
        """The packed weight and all of its scales."""
        state = self._state
        return [self.packed, state.absmax, *([state.state2.absmax] if state.nested else [])]

    @property
    def packed_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.packed_tensors)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return output


def quantized_layers(network: nn.Module) -> dict[str, QuantizedLinear]:
    """Name -> layer, of all layers whose weights are kept in 4 bits."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def to_quantize(
    network: nn.Module, adapter: AdapterConfig, *, without: Collection[str] = ()
) -> list[str]:
    """Names of the layers that are kept in 4 bits: all linear ones but the output head, those that
    are trained whole, and those that share their weight.

    Args:
        without: further parameters that are not, by name.

    Raises:
        ConfigError: there is none.
    """
    head = output_embedding(network)
    linear = {name: module for name, module in network.named_modules() if type(module) is nn.Linear}
    shared = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    saved = set(matching(linear, adapter.modules_to_save))
    names = [
        name
        for name, module in linear.items()
        if module is not head
        and name not in saved
        and f"{name}.weight" not in without
        and shared[id(module.weight)] == 1
    ]
    if not names:
        raise ConfigError(
            f"adapter.quantize={adapter.quantize}: {type(network).__name__} has no linear layer "
            "that can be kept in 4 bits (GPT-2's are stored transposed). Set adapter.quantize=none."
        )
    return names


@contextlib.contextmanager
def linear_layers_on_meta() -> Iterator[None]:
    """Inside, linear layers are made without memory."""
    original = nn.Linear.__init__

    def empty(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments[:3], **{**more, "device": "meta"})

    nn.Linear.__init__ = empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.__init__ = original  # type: ignore[method-assign]


def materialise(network: nn.Module, quantized: Collection[str], *, device: torch.device) -> None:
    """Give memory to what ``linear_layers_on_meta`` has left without, but for the weights of the
    ``quantized`` layers."""
    for name, module in network.named_modules():
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta and not (parameter_name == "weight" and name in quantized):
                memory = torch.empty_like(parameter, device=device)
                module.register_parameter(parameter_name, nn.Parameter(memory))


def quantize_on_arrival(
    network: nn.Module, quantization: Quantization, *, device: torch.device, dtype: torch.dtype
) -> Callable[[str, torch.Tensor], None]:
    """A function that takes the weights of ``materialise``'s quantized layers as they are read:
    it puts a quantized layer in the place of the one that a name is the weight of."""

    def put(name: str, value: torch.Tensor) -> None:
        layer = name.removesuffix(".weight")
        bias: Any = network.get_submodule(layer).bias
        parent, _, attribute = layer.rpartition(".")
        quantized = QuantizedLinear(value.to(device, dtype), bias, quantization)
        setattr(network.get_submodule(parent), attribute, quantized)

    return put
