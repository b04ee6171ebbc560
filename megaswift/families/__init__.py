"""Model families as data: how a Hugging Face `config.json` becomes Megatron's, and how weights map.

Owns one file a family and what they are made of. Reading and writing files belongs to the bridge.
"""

from megaswift.families.family import FAMILIES, Family, family_of, load_spec, read_config_json
from megaswift.families.model_spec import ModelSpec, RopeSpec

__all__ = ["FAMILIES", "Family", "ModelSpec", "RopeSpec", "family_of", "load_spec", "read_config_json"]
