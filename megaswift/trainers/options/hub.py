"""Section `hub`: the upload of the trained model to a model repository."""

from __future__ import annotations

from dataclasses import dataclass

from megaswift.options.option import one_of, option


@dataclass(frozen=True)
class HubConfig:
    """Upload to a hub"""

    push_to_hub: bool = option(False, "Upload OUT/hf, or OUT/adapter, to a model repository of the hub (use_hf)")
    hub_model_id: str | None = option(
        None,
        "Repository, NAME or ORGANIZATION/NAME; default: output_dir's name",
        aliases=("push_to_hub_model_id",),
        metavar="ID",
        only_with={"push_to_hub": one_of(True, notice=True)},
    )
    hub_token: str | None = option(
        None,
        "Hub token; default: the token stored by the hub's client",
        aliases=("push_to_hub_token",),
        secret=True,
        only_with={"push_to_hub": one_of(True, notice=True)},
    )
    hub_revision: str | None = option(
        None,
        "Branch of the repository, created if missing (Hugging Face); default: main",
        metavar="BRANCH",
        only_with={"push_to_hub": one_of(True, notice=True)},
    )
    hub_private_repo: bool = option(
        False, "Make a new repository private", only_with={"push_to_hub": one_of(True, notice=True)}
    )
    hub_strategy: str = option(
        "end",
        "Uploads besides the result: each save's weights, then the newest or all saves",
        choices=("end", "every_save", "checkpoint", "all_checkpoints"),
        only_with={"push_to_hub": one_of(True, notice=True)},
        neutral=(None, "end"),
    )
