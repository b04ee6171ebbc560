"""The layers of stages and chunks against Megatron-Core: its layout class, its counts and offsets, and what its config
refuses.

Covers: megaswift/parallel/pipeline_string.py.
"""

import itertools
from types import SimpleNamespace

import pytest

from megaswift.errors import LayoutError
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import (
    PipelineSplit,
    balanced_pipeline_layout_string,
    model_chunks_by_stage,
    split_problems,
)
from megaswift.parallel.pipeline_string import parse_layout_string


def pipeline(pp, vpp=1):
    return Layout(pp, pp=pp, vpp=vpp)


def layer_ids(chunks):
    """[pp][vpp] layer ids."""
    return [[list(chunk.layers) for chunk in stage] for stage in chunks]


def megatrons_config(layers, pp, vpp, split):
    """Megatron's own TransformerConfig: it raises on what it does not support."""
    import torch
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        pipeline_model_parallel_layout=split.custom,
    )


def megatrons_layers(config, layers, pp, vpp):
    """[pp][vpp] layer ids from Megatron's counts and offsets."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    out = []
    for p in range(pp):
        row = []
        for v in range(vpp):
            stage = v if vpp > 1 else None
            count, start = get_num_layers_to_build(config, stage, p), get_transformer_layer_offset(config, stage, p)
            row.append(list(range(start, start + count)))
        out.append(row)
    return out


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (4, 2), (3, 2)])
def test_even_and_uneven_splits_are_megatrons(megatron, pp, vpp):
    agreed = {True: 0, False: 0}
    for layers, first, last in itertools.product((2, 4, 6, 8, 12, 13, 24), (None, 1, 2, 3, 4), (None, 1, 2, 4)):
        split = PipelineSplit(first, last)
        if pp == 1 and (first or last):
            continue  # Megatron ignores the option, we refuse it
        if vpp > 1 and pp == 2 and first and last:
            continue  # Megatron divides by zero, we refuse it (below)
        try:
            config = megatrons_config(layers, pp, vpp, split)
            theirs = megatrons_layers(config, layers, pp, vpp)
        except (ValueError, AssertionError):
            theirs = None
        if theirs is not None and sorted(i for row in theirs for chunk in row for i in chunk) != list(range(layers)):
            theirs = None  # Megatron takes more layers at the ends than there are, and builds some twice or never
        problems = split_problems(layers, pp, vpp, split)
        assert bool(problems) == (theirs is None), (layers, pp, vpp, split, problems)
        if theirs is not None:
            assert layer_ids(model_chunks_by_stage(layers, pipeline(pp, vpp), split)) == theirs, (layers, split)
        agreed[theirs is None] += 1
    assert agreed[False] >= 5
    assert pp == 1 or agreed[True] > 5


def test_megatron_still_fails_with_both_ends_interleaved_over_two_stages(megatron):
    split = PipelineSplit(2, 6)
    config = megatrons_config(8, 2, 2, split)
    with pytest.raises(ZeroDivisionError):
        megatrons_layers(config, 8, 2, 2)
    with pytest.raises(LayoutError, match="--first_stage_layers 2 alone"):
        model_chunks_by_stage(8, pipeline(2, 2), split)


CUSTOM = [
    "Et*3|(t|)*4tL",
    "Ettt|(tt|)*2,tL",
    "E|t*8|t,t|L",
    "Ett|tt|tt|ttL",
    "E(t|t)*3L",
    "(Et|)*1tL",
    "Et|t|t|t|t|t|t|tL",
    "E,tt|ttL",
]


@pytest.mark.parametrize("text", CUSTOM)
def test_layout_strings_are_megatrons(megatron, text):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout as Theirs

    names = {"E": LayerType.embedding, "t": LayerType.decoder, "L": LayerType.loss, "m": LayerType.mtp}
    stages = parse_layout_string(text)
    assert [[names[letter] for letter in stage] for stage in stages] == Theirs.parse_str_to_list(text)
    layers = "".join(stages).count("t")
    for pp in range(2, len(stages) + 1):
        if len(stages) % pp:
            continue
        theirs = Theirs(text, pp)
        theirs.validate_layer_layout(layers, None)
        ours = model_chunks_by_stage(layers, pipeline(pp, len(stages) // pp), PipelineSplit(custom=text))
        for row, expected in zip(ours, theirs.layout, strict=True):
            for chunk, kinds in zip(row, expected, strict=True):
                assert len(chunk.layers) == kinds.count(LayerType.decoder)
                assert chunk.embedding == (LayerType.embedding in kinds)
                assert chunk.loss == (LayerType.loss in kinds)
        flat = [i for v in range(len(stages) // pp) for row in ours for i in row[v].layers]
        assert flat == list(range(layers))


@pytest.mark.parametrize(
    ("text", "pp", "layers", "says"),
    [
        ("Ett|tL", 2, 4, "has 3 layers (t), the model has 4"),
        ("tt|ttL", 2, 4, "must begin with the embedding E"),
        ("Ett|L|tt", 3, 4, "end with the loss L"),
        ("Ett|x|ttL", 3, 4, "has 'x'"),
        ("Et|t|ttL", 2, 4, "has 3 stages, which --pp 2 does not divide"),
        ("Ett||ttL", 3, 4, "stage 1 of 3 is empty"),
        ("Ett|ttm|L", 3, 4, "multi-token-prediction"),
    ],
)
def test_wrong_layout_strings(text, pp, layers, says):
    problems = split_problems(layers, pp, 1, PipelineSplit(custom=text))
    assert any(says in str(problem) for problem in problems), problems


def test_refusals_have_numbers_and_a_way_out():
    assert "10 layers are not divisible by 4 stages" in str(*split_problems(10, 4, 1, PipelineSplit()))
    assert "try: --pp 5, or --pp 2, or --pipeline_layout 'Et*2|t*3|t*3|t*2L'" in str(
        *split_problems(10, 4, 1, PipelineSplit())
    )
    assert "8 layers are not divisible by 2 x 3 = 6 chunks" in str(*split_problems(8, 2, 3, PipelineSplit()))
    assert "--vpp 4, or --vpp 2" in str(*split_problems(8, 2, 3, PipelineSplit()))
    assert "2 layers are fewer than 4 stages" in str(*split_problems(2, 4, 1, PipelineSplit()))
    assert "--pp is 1" in str(*split_problems(4, 1, 1, PipelineSplit(first=2)))
    assert "the other 7 of 8 layers are not divisible by 3 stages" in str(
        *split_problems(8, 4, 1, PipelineSplit(first=1))
    )
    assert "--first_stage_layers 2" in str(*split_problems(8, 4, 1, PipelineSplit(first=1)))
    both = split_problems(4, 2, 1, PipelineSplit(first=2, custom="Ett|ttL"))
    assert "conflicts with --pipeline_layout" in str(both[0])


@pytest.mark.parametrize(("layers", "stages"), [(10, 4), (7, 3), (61, 16), (5, 5), (9, 2), (48, 8)])
def test_the_layout_offered_instead_works(layers, stages):
    text = balanced_pipeline_layout_string(layers, stages)
    assert split_problems(layers, stages, 1, PipelineSplit(custom=text)) == []
    counts = [len(row[0].layers) for row in model_chunks_by_stage(layers, pipeline(stages), PipelineSplit(custom=text))]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == layers


def test_chunks_read_well():
    chunks = model_chunks_by_stage(8, pipeline(2, 2))
    assert [[str(chunk) for chunk in row] for row in chunks] == [["embed+0-1", "4-5"], ["2-3", "6-7+head"]]
    assert [str(row[0]) for row in model_chunks_by_stage(2, pipeline(3), PipelineSplit(custom="E|t|tL"))] == [
        "embed",
        "0",
        "1+head",
    ]


def test_from_config():
    section = SimpleNamespace(first_stage_layers=3, last_stage_layers=None, pipeline_layout=None)
    assert PipelineSplit.from_config(section) == PipelineSplit(first=3)
