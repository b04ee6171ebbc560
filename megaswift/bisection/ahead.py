"""The reference's layers for multi-token prediction: transformers' own, by the names of the model's folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaswift.bridge.hf.source import HfSource
from megaswift.bridge.plan import WeightPlan
from megaswift.errors import Problem, UserError
from megaswift.models.family import read_config_json

NAME = re.compile(r"mtp\.layers\.(\d+)\.")
"""How traces name what is in a layer."""
PARAMETER = "ahead."
"""Before the names of parameters of these layers, which are told apart from the model's own by it."""
ATTENTION = "full_attention"
BLOCK = "mtp_block"
FUSED = "experts.gate_up_proj"
"""One tensor of transformers with two of a folder for each expert."""
DOWN = "experts.down_proj"


def tokens_ahead(name: str) -> int:
    """Return how many tokens further than the decoder a layer reads: so many at the end of a document have none."""
    match = NAME.match(name)
    return 0 if match is None else int(match[1]) + 1


def check_reference(folder: Path) -> None:
    """Check that transformers can build these layers for a model.

    Raises:
        UserError: The installed version has none, or the model ends in a layer from which it cannot build them.
    """
    import transformers
    from transformers import modeling_layers

    option = "--mtp_num_layers"
    if not hasattr(modeling_layers, "MtpModel"):
        rule = f"needs a reference, which transformers {transformers.__version__} does not have"
        raise UserError(Problem(option, rule, "pip install -U transformers, or leave the option out"))
    config = read_config_json(folder)
    kinds = config.get("text_config", config).get("layer_types") or [ATTENTION]
    if kinds[-1] != ATTENTION:
        rule = f"needs a model whose last layer is {ATTENTION}, like its own; {len(kinds)} layers end in {kinds[-1]}"
        fix = f"--layers {kinds.index(ATTENTION) + 1}" if ATTENTION in kinds else "leave the option out"
        raise UserError(Problem(option, rule, fix))


class LayersAhead:
    """The layers beside a model, with which they share the embedding and the head.

    Args:
        model: The Hugging Face model.
        folder: Its folder, which has their weights.
        plan: The model's weight plan, with as many of these layers as take part.
    """

    def __init__(self, model: Any, folder: Path, plan: WeightPlan) -> None:
        from transformers.modeling_layers import MtpModel

        spec = plan.spec
        count = spec.mtp_layers
        config = model.config.get_text_config()
        config.num_mtp_layers = count
        for kinds, kind in (("layer_types", ATTENTION), ("mlp_layer_types", "sparse")):
            if getattr(config, kinds, None) is not None:
                setattr(config, f"mtp_{kinds}", [kind] * count)
        self.model = model
        self.made = MtpModel(model, count).eval()
        self.layers: nn.ModuleList = self.made.layers
        self.plan = plan
        table = plan.family.mtp
        assert table is not None
        patterns = {
            "enorm": table.embedding_norm.removesuffix(".weight"),
            "hnorm": table.hidden_norm.removesuffix(".weight"),
            "eh_proj": table.projection.removesuffix(".weight"),
            "post_norm": table.output_norm.removesuffix(".weight"),
            BLOCK: table.layer.removesuffix("."),
        }
        self.homes = {
            table.name(pattern, spec, number): f"{number}.{part}"
            for number in range(count)
            for part, pattern in patterns.items()
        }
        """A path of the folder -> the module."""
        self._load(folder)

    def _load(self, folder: Path) -> None:
        source = HfSource(folder)
        saved = self.layers.state_dict().keys()
        tensors: dict[str, Tensor] = dict(self.layers.named_parameters())
        tensors |= {name: b for name, b in self.layers.named_buffers() if name in saved}
        with torch.no_grad():
            for name, tensor in self.by_disk_name(tensors):
                tensor.copy_(source.slice(name))
        source.close()

    def block(self, number: int) -> nn.Module:
        """Return the decoder layer inside a layer."""
        return self.layers[number].get_submodule(BLOCK)

    def module(self, path: str) -> nn.Module | None:
        """Return the module of a path of the folder; None where it is none of these layers'."""
        for home, module in self.homes.items():
            if path == home or path.startswith(f"{home}."):
                try:
                    return self.layers.get_submodule(module + path.removeprefix(home))
                except AttributeError:
                    continue
        return None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, by names that are none of the model's."""
        for name, p in self.layers.named_parameters():
            yield PARAMETER + name, p

    def by_disk_name(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of these layers by the names of the folder; experts one by one where the folder has them so."""
        disk = {module: home for home, module in self.homes.items()}
        for name, tensor in tensors.items():
            number, part, rest = name.removeprefix(PARAMETER).split(".", 2)
            stored = f"{disk[f'{number}.{part}']}.{rest}"
            if stored in self.plan.by_hf or not stored.endswith((FUSED, DOWN)):
                yield stored, tensor
            elif stored.endswith(DOWN):
                for expert, one in enumerate(tensor):
                    yield stored.replace("down_proj", f"{expert}.down_proj.weight"), one
            else:
                for expert, both in enumerate(tensor):
                    for half, kind in zip(both.chunk(2), ("gate_proj", "up_proj"), strict=True):
                        yield stored.replace("gate_up_proj", f"{expert}.{kind}.weight"), half

    def hidden_states(self, layer: int, hidden: Tensor, vectors: Tensor) -> Tensor:
        """Run a layer: hidden states and embeddings [b, s, h] to hidden states of the same shape."""
        positions = torch.arange(hidden.shape[1]).expand(len(hidden), -1)
        out: Tensor = self.made.forward_layer(layer, hidden, positions, None, inputs_embeds=vectors)
        return out
