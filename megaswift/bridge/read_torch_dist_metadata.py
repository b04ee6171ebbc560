"""The reader of `.metadata` under the path that scripts from before `bridge/checkpoint/` import."""

from megaswift.bridge.checkpoint.metadata import read_torch_dist_metadata

__all__ = ["read_torch_dist_metadata"]
