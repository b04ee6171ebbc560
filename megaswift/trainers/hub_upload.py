"""`--push_to_hub`: uploads of what a run exports to a model repository of a hub, by rank 0.

Owns the repository, when something is uploaded, and the messages. No token is in a message or a file.
"""

from __future__ import annotations

from pathlib import Path

from megaswift import distributed, log
from megaswift.config import SwiftConfig
from megaswift.errors import ConfigError, Problem, first_line
from megaswift.redaction import MASK
from megaswift.trainers.hub_clients import client_failures, hub_client
from megaswift.trainers.progress import print_warning


class HubUpload:
    """The repository of a run. It is made before anything expensive, so that a wrong token or name shows then."""

    def __init__(self, cfg: SwiftConfig) -> None:
        train = cfg.train
        self.client = hub_client(cfg)
        self.token, self.every_save = train.hub_token, train.hub_strategy == "every_save"
        self.name = train.hub_model_id or Path(train.output_dir).absolute().name
        self.private = train.hub_private_repo
        self.repository = distributed.run_on_rank0(self._create)

    def _create(self) -> str:
        try:
            return self.client.create(self.name, self.private)
        except client_failures() as error:
            rule = f"the hub does not give access to {self.name}: {self._reason(error)}"
            fix = f"check --hub_model_id and --hub_token (or {self.client.login})"
            raise ConfigError(Problem("--push_to_hub true", rule, fix)) from None

    def _reason(self, error: BaseException) -> str:
        text = first_line(error)
        return text.replace(self.token, MASK) if self.token else text

    def _send(self, folder: Path, step: int) -> str:
        self.client.send(self.repository, folder, f"step {step}")
        return f"uploaded {folder} to {self.repository}"

    def after_save(self, step_folder: Path, step: int) -> None:
        """The weights of a checkpoint, where it holds them by themselves. What fails is tried again at the next one.
        Collective."""
        folder = next((path for name in ("hf", "adapter") if (path := step_folder / name).is_dir()), None)
        if not self.every_save or folder is None:
            return

        def send() -> None:
            try:
                log.info(self._send(folder, step))
            except client_failures() as error:
                print_warning(f"step {step}: the upload to {self.repository} failed: {self._reason(error)}")

        distributed.run_on_rank0(send, hours=24)

    def at_end(self, folder: Path, step: int) -> None:
        """The export. ConfigError where it fails: everything is on disk by then. Collective."""

        def send() -> None:
            try:
                log.print_result(self._send(folder, step))
            except client_failures() as error:
                rule = f"the upload to {self.repository} failed: {self._reason(error)}"
                fix = f"{self.client.command} {self.repository} {folder}"
                raise ConfigError(Problem("--push_to_hub true", rule, fix)) from None

        distributed.run_on_rank0(send, hours=24)


def hub_upload_of(cfg: SwiftConfig) -> HubUpload | None:
    """Of a run that uploads. Collective."""
    return HubUpload(cfg) if cfg.train.push_to_hub else None
