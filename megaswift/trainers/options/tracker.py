"""Section `trackers`: where the experiment trackers of `report_to` keep a run. What is not set here they read from
their own environment variables."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import option
from megaswift.options.tasks import EVERY_TASK

TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio", "prometheus")
"""Values of `report_to`. Each is also the name of the package that it needs, unless `PACKAGES` has another, and of its
folder in the output folder."""
PACKAGES = {"prometheus": "prometheus_client"}


@dataclass(frozen=True)
class TrackerConfig:
    """Experiment trackers

    Unset options: the tracker's own environment variables (WANDB_PROJECT, SWANLAB_PROJECT, ...)."""

    report_to: tuple[str, ...] = option(
        ("tensorboard",),
        "Experiment trackers, in addition to metrics.jsonl; none: no tracker",
        choices=TRACKERS,
        common=EVERY_TASK,
    )
    run_name: str | None = option(
        None,
        "Name of the run in online trackers; default: the name of output_dir",
        aliases=("experiment_name", "swanlab_exp_name", "wandb_exp_name"),
    )
    tensorboard_dir: str | None = option(
        None,
        "Folder of TensorBoard events; default: output_dir/runs",
        aliases=("logging_dir", "tensorboard_log_dir"),
        metavar="DIR",
        only_with={"report_to": "tensorboard"},
    )
    wandb_project: str | None = option(
        None, "Weights & Biases: project", metavar="NAME", only_with={"report_to": "wandb"}
    )
    wandb_entity: str | None = option(
        None, "Weights & Biases: user or team that owns the project", metavar="NAME", only_with={"report_to": "wandb"}
    )
    swanlab_project: str | None = option(None, "SwanLab: project", metavar="NAME", only_with={"report_to": "swanlab"})
    swanlab_workspace: str | None = option(
        None, "SwanLab: user or organization that owns the project", metavar="NAME", only_with={"report_to": "swanlab"}
    )
    swanlab_mode: str | None = option(
        None,
        "SwanLab: where the run is stored",
        choices=("online", "local", "offline", "disabled"),
        spellings={"cloud": "online"},
        metavar="MODE",
        only_with={"report_to": "swanlab"},
    )
    swanlab_token: str | None = option(
        None,
        "SwanLab: API key; safer: the environment variable SWANLAB_API_KEY",
        aliases=("swanlab_api_key",),
        secret=True,
        only_with={"report_to": "swanlab"},
    )
    mlflow_tracking_uri: str | None = option(
        None, "MLflow: server, or folder with the runs", metavar="URI", only_with={"report_to": "mlflow"}
    )
    mlflow_experiment_name: str | None = option(
        None, "MLflow: experiment", metavar="NAME", only_with={"report_to": "mlflow"}
    )
    trackio_project: str = option("megaswift", "Trackio: project", metavar="NAME", only_with={"report_to": "trackio"})
    trackio_space_id: str | None = option(
        None,
        "Trackio: Hugging Face Space that gets the run; default: none, a local store",
        metavar="OWNER/NAME",
        only_with={"report_to": "trackio"},
    )
    prometheus_port: int = option(
        9464, "Prometheus: port of http://HOST:PORT/metrics on rank 0", only_with={"report_to": "prometheus"}
    )
    prometheus_host: str = option(
        "127.0.0.1",
        "Prometheus: address to listen on; 0.0.0.0: all networks, no password",
        metavar="HOST",
        only_with={"report_to": "prometheus"},
    )
