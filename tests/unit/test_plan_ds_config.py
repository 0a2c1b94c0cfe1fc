"""The only writer of DeepSpeed's JSON, held against the installed DeepSpeed itself."""

from __future__ import annotations

import pytest

from llmx.errors import ConfigError
from llmx.plan import ds_keys
from llmx.plan.ds_config import merge_extra
from tests.composing import composed


@pytest.fixture(scope="module")
def deepspeed_models():
    import os

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }


@pytest.mark.parametrize("section", sorted(ds_keys.SECTIONS))
def test_known_keys_are_those_of_deepspeed(section, deepspeed_models) -> None:
    fields = deepspeed_models[section].model_fields
    accepted = {field.alias or name for name, field in fields.items()} | set(fields)
    assert ds_keys.SECTIONS[section] <= accepted
    known = ds_keys.SECTIONS[section] | set(ds_keys.RETIRED_ZERO)
    # An alias (stage3_...) stands for its field; deprecated spellings are left out on purpose.
    missing = {
        name
        for name, field in fields.items()
        if not {name, field.alias} & known and not field.deprecated
    }
    assert missing <= {"stage3_gather_fp16_weights_on_model_save"}


@pytest.mark.parametrize(
    "overrides",
    [
        ["zero=stage0", "hardware=cpu2"],
        ["zero=stage1", "hardware=a100x8"],
        ["zero=stage2_offload", "hardware=a100x8"],
        ["zero=stage3_offload", "hardware=a100x8"],
        ["zero=infinity", "hardware=h100x8"],
        ["zero=stage3_zeropp", "hardware=a100x2_v100x2"],
    ],
)
def test_deepspeed_reads_what_is_written(overrides, deepspeed_models) -> None:
    config = composed(overrides).ds_config
    for section, model in deepspeed_models.items():
        read = model(**config[section])
        for key, value in config[section].items():
            if isinstance(value, bool | int | float):
                name = key.removeprefix("stage3_")
                assert getattr(read, name if hasattr(read, name) else key) == value, key


def test_unequal_ranks_get_a_consistent_triple() -> None:
    config = composed(
        ["hardware=a100x2_v100x2", "batch=by_speed", "batch.accumulation=3"]
    ).ds_config
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert config["train_batch_size"] == 1 * 3 * 4


def test_extra_is_merged_and_checked() -> None:
    merged = merge_extra({"a": 1, "fp16": {"enabled": True}}, {"fp16": {"hysteresis": 4}})
    assert merged == {"a": 1, "fp16": {"enabled": True, "hysteresis": 4}}
    with pytest.raises(ConfigError, match="set zero.offload_param"):
        merge_extra({"zero_optimization": {}}, {"zero_optimization": {"offload_param": {}}})
