"""`--push_to_hub`: uploads of what a run exports to a model repository of a hub, by rank 0.

Owns the repository's name and when something is uploaded. No token is in a message or a file.
"""

from __future__ import annotations

from pathlib import Path

from megaswift import distributed, log
from megaswift.base.versions import VERSION
from megaswift.trainers.hooks.progress import print_warning
from megaswift.trainers.hub_clients import HubRepository, client_failures, hub_client
from megaswift.trainers.options.hub import HubConfig

END = "end"
WHOLE = {"checkpoint": "last-checkpoint", "all_checkpoints": ""}
"""Strategies that upload checkpoints with all that a run needs to resume: the folder of the repository, transformers'
name; empty: one a checkpoint."""


class HubUpload:
    """The repository of a run. Collective."""

    def __init__(self, options: HubConfig, output_dir: str, use_hf: bool) -> None:
        self.strategy = options.hub_strategy
        output = Path(output_dir).absolute()
        output = output.parent if VERSION.fullmatch(output.name) else output  # versions are commits of one repository
        name = options.hub_model_id or output.name
        self.repository = HubRepository(
            hub_client(use_hf, options.hub_token, options.hub_revision), options.hub_token, name
        )
        self.repository.name = distributed.run_on_rank0(lambda: self.repository.create(options.hub_private_repo))

    def after_save(self, step_folder: Path, step: int) -> None:
        """Upload the weights of a checkpoint, where it holds them by themselves, and the checkpoint itself. A failed
        upload is tried again after the next save. Collective."""
        folder = next((path for name in ("hf", "adapter") if (path := step_folder / name).is_dir()), None)
        uploads = [] if self.strategy == END or folder is None else [(folder, "")]
        if self.strategy in WHOLE:
            uploads.append((step_folder, WHOLE[self.strategy] or step_folder.name))
        if not uploads:
            return

        def send() -> None:
            try:
                for source, place in uploads:
                    log.info(self.repository.send(source, f"step {step}", place))
            except client_failures() as error:
                reason = self.repository.reason(error)
                print_warning(f"step {step}: the upload to {self.repository.name} failed: {reason}")

        distributed.run_on_rank0(send, hours=24)

    def at_end(self, folder: Path, step: int) -> None:
        """Upload the export; raise ConfigError where that fails, when everything is on disk. Collective."""

        def send() -> None:
            log.print_result(self.repository.send_or_explain(folder, f"step {step}"))

        distributed.run_on_rank0(send, hours=24)
