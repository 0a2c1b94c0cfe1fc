"""The plugins of llmx by name, shipped and from installed packages: trackers, transports,
optimizers, dataset formats, types of data files.

A package adds one by an entry point, whose name is then a value of the config:

    [project.entry-points."llmx.trackers"]
    aim = "my_package.aim:AimTracker"           # tracking.kinds=[aim]

The config is read on every host, so the package must be installed in the Python of each.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmx.errors import ConfigError


@dataclass(frozen=True)
class Plugins:
    """The plugins of one kind. As a rule of a field (``fields.choice``), it takes installed
    ones."""

    noun: str
    group: str
    """The group of the entry points."""
    shipped: Mapping[str, str]
    """Name -> ``module:object``, as an entry point names it."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """A name that others have for something -> how it is done here."""

    @property
    def rule(self) -> str:
        """The rule for a name that is not shipped."""
        return f"be {self.noun} of an installed package (entry point of {self.group})"

    def problem(self, name: str) -> str:
        """Empty where an installed package has an entry point of this name; else the rule."""
        return "" if name in self._entry_points() else self.rule

    def load(self, name: str) -> Any:
        """The object of that name. Raises ConfigError where it cannot be imported."""
        target = self.shipped.get(name) or self._entry_points().get(name)
        if target is None:
            raise ConfigError(f"{name!r} must {self.rule}.")
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{name} is {self.noun} that cannot be imported ({target}): {error}. Install "
                "what its package needs, or choose another one."
            ) from error

    def _entry_points(self) -> dict[str, str]:
        from importlib.metadata import entry_points  # a tenth of a second, rarely needed

        return {point.name: point.value for point in entry_points(group=self.group)}


TRACKERS = Plugins(
    "a tracker",
    "llmx.trackers",
    {
        "wandb": "llmx.tracking.wandb_run:WandbTracker",
        "tensorboard": "llmx.tracking.tensorboard:TensorBoardTracker",
        "csv": "llmx.tracking.csv_file:CsvTracker",
        "mlflow": "llmx.tracking.mlflow_run:MlflowTracker",
        "swanlab": "llmx.tracking.swanlab_run:SwanlabTracker",
    },
)
"""Classes: ``llmx.tracking.base.Tracker``."""
TRANSPORTS = Plugins(
    "a transport",
    "llmx.transports",
    {
        "local": "llmx.launch.transports.ssh:LocalTransport",
        "ssh": "llmx.launch.transports.ssh:SshTransport",
        "pdsh": "llmx.launch.transports.deepspeed:PdshTransport",
        "openmpi": "llmx.launch.transports.deepspeed:OpenMpiTransport",
        "slurm": "llmx.launch.transports.slurm:SlurmTransport",
        "external": "llmx.launch.transports.external:ExternalTransport",
    },
    instead=dict.fromkeys(
        ("mpich", "impi", "mvapich"),
        "Let its own mpiexec start the processes (mpiexec ... python -m llmx ... launch=external), "
        "or use launch.transport=openmpi, ssh or pdsh.",
    ),
)
"""Classes: ``llmx.launch.transports.Transport``."""
OPTIMIZERS = Plugins(
    "an optimizer",
    "llmx.optimizers",
    {
        kind: f"llmx.config.optimizers:{kind.upper()}"
        for kind in "adamw cpu_adam fused_adam lion sgd muon adafactor adam8bit".split()
    },
)
"""``llmx.config.optimizers.Optimizer``."""
FORMATS = Plugins("a dataset format", "llmx.formats", {})
"""``llmx.data.format.formats.Format``; those of llmx are in ``FORMATS`` there, to which a name of
``data.form`` adds."""
FILE_TYPES = Plugins("a type of data files", "llmx.file_types", {})
"""``llmx.config.file_formats.FileType``, by a suffix without its dot; those of llmx stand there."""
