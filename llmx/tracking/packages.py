"""The packages of the trackers that llmx does not bring along."""

from __future__ import annotations

from importlib import util

from llmx.config import TrackingConfig
from llmx.errors import ConfigError

OPTIONAL = {
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "swanlab": ("swanlab",),
}
"""By tracker: the modules that it needs."""


def check_packages(tracking: TrackingConfig) -> None:
    """ConfigError for each of ``tracking.kinds`` whose packages are not installed here, where the
    tracker process runs."""
    problems = []
    for kind in dict.fromkeys(tracking.kinds):
        missing = [name for name in OPTIONAL.get(kind, ()) if util.find_spec(name) is None]
        if missing:
            problems.append(
                f"tracking.kinds has {kind}, which needs a package that is not installed on this "
                f"machine ({', '.join(missing)}). Run `pip install llmx[{kind}]`, or leave it out "
                "(tracking=csv)."
            )
    if problems:
        raise ConfigError("\n".join(problems))
