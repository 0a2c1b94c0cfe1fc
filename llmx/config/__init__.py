"""Schema, typed reading, and the rules that hold before a GPU is touched."""

from llmx.config.build import experiment_from_dict, known_keys, to_dict
from llmx.config.schema import (
    SCHEMA_VERSION,
    BatchConfig,
    DataConfig,
    DeviceConfig,
    Experiment,
    HardwareConfig,
    HostConfig,
    LaunchConfig,
    ModelConfig,
    OptimConfig,
    SlurmConfig,
    SourceConfig,
    TaskConfig,
    TokenizerConfig,
    TrackingConfig,
    ZeroConfig,
)

__all__ = [
    "SCHEMA_VERSION",
    "BatchConfig",
    "DataConfig",
    "DeviceConfig",
    "Experiment",
    "HardwareConfig",
    "HostConfig",
    "LaunchConfig",
    "ModelConfig",
    "OptimConfig",
    "SlurmConfig",
    "SourceConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "ZeroConfig",
    "experiment_from_dict",
    "known_keys",
    "to_dict",
]
