"""The only writer of DeepSpeed's JSON, held against the installed DeepSpeed itself."""

from __future__ import annotations

import os

import pytest

from llmx.errors import ConfigError
from llmx.plan.ds_config import INSTEAD, TAKEN, merge_extra
from tests.composing import composed, planned


@pytest.fixture(scope="module")
def deepspeed_models():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }


def top_level_keys() -> set[str]:
    """What the installed DeepSpeed asks its configuration for."""
    asked: set[str] = set()

    class Asked:
        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

    class Keys(Asked, list): ...

    class Watched(Asked, dict):
        def __getitem__(self, key: str):
            asked.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default=None):
            asked.add(key)
            return super().get(key, default)

        def keys(self):
            return Keys(super().keys())

    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(Watched(train_batch_size=1))
    return asked


def test_every_key_is_one_that_deepspeed_reads(deepspeed_models) -> None:
    top = top_level_keys()
    for place in TAKEN:
        section, _, name = place.rpartition(".")
        if section in deepspeed_models:
            fields = deepspeed_models[section].model_fields
            assert name in {field.alias or key for key, field in fields.items()}, place
        else:
            assert (section or name) in top, place
    assert not set(TAKEN) & set(INSTEAD)


@pytest.mark.parametrize(
    "overrides",
    [
        ["zero=stage0", "hardware=cpu2"],
        ["zero=stage2_offload", "hardware=a100x8"],
        ["zero=stage3_offload", "hardware=a100x8"],
        ["zero=infinity", "hardware=h100x8"],
        ["zero=stage3_zeropp", "hardware=a100x2_v100x2"],
        ["hardware=a100x2_v100x2", "batch=by_speed", "batch.accumulation=3"],
    ],
)
def test_deepspeed_reads_what_is_written(overrides, deepspeed_models) -> None:
    done = composed(overrides)
    config, batch = done.ds_config, done.plan.batch
    micro = config["train_micro_batch_size_per_gpu"]  # a consistent triple, where ranks differ, too
    assert config["train_batch_size"] == micro * batch.accumulation * done.plan.world_size
    for section, model in deepspeed_models.items():
        read = model(**config[section])
        for key, value in config[section].items():
            if isinstance(value, bool | int | float):
                name = key.removeprefix("stage3_")
                assert getattr(read, name if hasattr(read, name) else key) == value, key


PLAIN = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, "bf16": {"enabled": False}}


def test_extra_is_merged() -> None:
    merged = merge_extra(PLAIN, {"fp16": {"hysteresis": 4}, "communication_data_type": "fp32"})
    assert merged["fp16"] == {"enabled": True, "hysteresis": 4}
    assert merged["communication_data_type"] == "fp32"
    assert PLAIN["fp16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "Set zero=stage3 instead"),
        ({"compile": {"deepcompile": True}}, "Set model.compile=true"),
        ({"gradient_allreduce_op": "sum"}, "would have no effect here, or make the plan, the grad"),
        ({"zero_optimization": {"reduce_bucket_size": 5}}, "Set zero.reduce_bucket_size"),
        ({"zero_optimization": {"stage3_max_live_parameters": 5}}, "Set zero.max_live_parameters"),
        ({"zero_optimization": {"round_robin": True}}, 'Did you mean "round_robin_gradients"'),
        (
            {"fp16": {"fp16_master_weights_and_grads": True}},
            "zero.extra.fp16 takes consecutive_hysteresis",
        ),
        ({"fp16": True}, "must be a mapping"),
        (
            {"zero_optimization": {"model_persistence_threshold": 5}},
            "write it as zero_optimization.stage3_model_persistence_threshold",
        ),
        # All that is wrong is said at once.
        ({"pipeline": {}, "optimizer": {}}, r"(?s)zero.extra.pipeline: .*\nzero.extra.optimizer: "),
    ],
)
def test_what_would_have_no_effect_or_a_wrong_one_is_refused(extra, message) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_extra(PLAIN, extra)


@pytest.mark.usefixtures("made_up_traces")
def test_gradients_reduced_in_fp32_are_counted() -> None:
    words = ["hardware=a100x8", "model=llama3_8b", "zero=stage2"]
    fp32 = "zero.extra.communication_data_type=fp32"
    plain, wide = (planned([*words, *more]).plan.memory[0] for more in ([], [fp32]))
    assert wide.buffers_gib * 2**30 >= plain.buffers_gib * 2**30 + 4 * 4096**2


def test_the_gathered_bucket_is_as_large_as_the_reduced_one_unless_given() -> None:
    def sizes(*words: str) -> tuple[int, int]:
        found = composed(["hardware=cpu2", "zero=stage2", *words]).ds_config["zero_optimization"]
        return found["reduce_bucket_size"], found["allgather_bucket_size"]

    own, gathered = sizes()
    assert own == gathered
    assert sizes("zero.reduce_bucket_size=3001") == (3001, 3002)  # DeepSpeed gathers even ones
    assert sizes("zero.allgather_bucket_size=500") == (own, 500)
    assert sizes("zero.reduce_bucket_size=3000", "zero.allgather_bucket_size=500") == (3000, 500)
