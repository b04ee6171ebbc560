"""Model families, one file each: how a Hugging Face `config.json` becomes Megatron's, and how weights map.

A file is named by its `model_type` and registers two tables. `megaswift.models` has what the tables are made of.
"""

import sys

from megaswift.models.family import FAMILIES, Family, family_of, load_spec, read_config_json
from megaswift.models.fields import decoder
from megaswift.models.spec import ModelSpec, RopeSpec
from megaswift.models.weights import blocks

__all__ = ["FAMILIES", "Family", "ModelSpec", "RopeSpec", "family_of", "load_spec", "read_config_json"]

# Import paths that family files of other packages use.
sys.modules[f"{__name__}.config_common"] = decoder
sys.modules[f"{__name__}.weight_table_blocks"] = blocks
