"""The row encoder under the path that scripts from before `data/encode/` import."""

from megaswift.data.encode.rows import RowEncoder, encode_spec

__all__ = ["RowEncoder", "encode_spec"]
