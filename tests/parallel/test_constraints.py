"""Layout refusals: the verdict against Megatron-Core's own, the wording against hand values, the search against all
layouts.

Covers: megaswift/parallel/checks.py, megaswift/parallel/model_shape.py.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megaswift.config import SwiftConfig
from megaswift.errors import LayoutError
from megaswift.parallel.checks import layout_problems, legal_layout, nearest_layout, suggested_layout_flags_text
from megaswift.parallel.constraints import LayoutRequest, broken_rule_problems
from megaswift.parallel.model_shape import ModelShape
from megaswift.parallel.pipeline_split import PipelineSplit

DENSE = ModelShape(num_layers=12, heads=8, kv_heads=4, head_dim=8, ffn=96)
MOE = replace(DENSE, experts=8, expert_ffn=24, moe_layers=(False,) + (True,) * 11)


def config(**options):
    return SwiftConfig(task="sft", **options)


def layout_for(cfg, shape, world):
    return legal_layout(shape, LayoutRequest.of(cfg.parallel, world, cfg.data.max_length, cfg.train))


def test_heads_are_refused_where_megatron_refuses(megatron):
    import torch
    from megatron.core.transformer import TransformerConfig

    verdicts = {True: 0, False: 0}
    for heads, kv, tp in itertools.product((4, 6, 8, 12), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8)):
        if heads % kv:
            continue
        try:
            TransformerConfig(
                num_layers=2,
                hidden_size=96,
                num_attention_heads=heads,
                num_query_groups=kv,
                kv_channels=8,
                tensor_model_parallel_size=tp,
                use_cpu_initialization=True,
                pipeline_dtype=torch.float32,
            )
            fine = (heads + 2 * kv) * 8 % tp == 0  # ColumnParallelLinear of linear_qkv divides these rows
        except ValueError:
            fine = False
        shape = replace(DENSE, heads=heads, kv_heads=kv, ffn=tp * 16)
        assert (not list(broken_rule_problems(shape, LayoutRequest(tp, tp=tp)))) == fine, (heads, kv, tp)
        verdicts[fine] += 1
    assert min(verdicts.values()) > 10


def test_expert_and_sequence_parallel_rules_are_megatrons(megatron):
    from megatron.core.transformer import TransformerConfig

    def theirs(**given):
        try:
            TransformerConfig(num_layers=2, hidden_size=96, num_attention_heads=4, use_cpu_initialization=True, **given)
        except ValueError:
            return False
        return True

    assert not theirs(sequence_parallel=True) and list(
        broken_rule_problems(DENSE, LayoutRequest(1, sequence_parallel=True))
    )
    assert not theirs(expert_model_parallel_size=2) and list(broken_rule_problems(DENSE, LayoutRequest(2, ep=2)))
    assert theirs(expert_model_parallel_size=2, num_moe_experts=4) and not list(
        broken_rule_problems(MOE, LayoutRequest(2, ep=2))
    )
    with pytest.raises(AssertionError, match="ETP==1"):
        theirs(expert_tensor_parallel_size=2, num_moe_experts=4, add_bias_linear=True)
    assert list(broken_rule_problems(replace(MOE, expert_bias=True), LayoutRequest(2, etp=2))) and not list(
        broken_rule_problems(MOE, LayoutRequest(2, etp=2))
    )


REFUSED = [
    (
        DENSE,
        dict(world_size=8, tp=3),
        ["--tp 3: requires a multiple of 3 processes; there are 8", "8 attention heads are not divisible by 3"],
    ),
    (
        DENSE,
        dict(world_size=1, tp=2),
        ["--tp 2: requires a multiple of 2 processes; there are 1", "use 2 processes (--nproc_per_node)"],
    ),
    (DENSE, dict(world_size=16, tp=16), ["8 attention heads are not divisible by 16", "--tp 8"]),
    (
        replace(DENSE, heads=12, kv_heads=6),
        dict(world_size=4, tp=4),
        ["6 key/value heads are neither a multiple nor a divisor of 4", "--tp 2"],
    ),
    (
        replace(DENSE, heads=12, kv_heads=1, head_dim=1),
        dict(world_size=4, tp=4),
        ["the 14 rows of queries, keys and values"],
    ),
    (
        replace(DENSE, whole_kv=True),
        dict(world_size=8, tp=8),
        ["norm over all 4 key/value heads requires", "--tp 4", "nearest layout that works on 8 processes: --tp 4"],
    ),
    (replace(DENSE, ffn=97), dict(world_size=2, tp=2), ["inner width of 97 is not divisible by 2", "--tp 1"]),
    (MOE, dict(world_size=16, etp=16), ["an expert's inner width of 24 is not divisible by 16", "--etp 8"]),
    (
        DENSE,
        dict(world_size=8, pp=8),
        ["12 layers are not divisible by 8 stages", "--pp 6", "nearest layout that works on 8 processes: --pp 4"],
    ),
    (DENSE, dict(world_size=16, pp=16), ["12 layers are fewer than 16 stages"]),
    (DENSE, dict(world_size=4, pp=4, vpp=2), ["12 layers are not divisible by 4 x 2 = 8 chunks", "--vpp 3"]),
    (DENSE, dict(world_size=4, vpp=2), ["--vpp 2: model chunks need a pipeline, but --pp is 1"]),
    (
        DENSE,
        dict(world_size=4, pp=4, split=PipelineSplit(first=2)),
        ["the other 10 of 12 layers are not divisible by 3 stages", "--first_stage_layers 3"],
    ),
    (
        DENSE,
        dict(world_size=2, cp=2, max_length=1022),
        ["--max_length 1022", "2 x --cp 2 = 4", "--max_length 1024, or --max_length 1020"],
    ),
    (
        DENSE,
        dict(world_size=8, cp=8, cp_comm_type="a2a", max_length=1024),
        ["8 heads and 4 key/value heads", "divisible by 8"],
    ),
    (
        DENSE,
        dict(world_size=8, cp=8, cp_comm_type="a2a+p2p", max_length=1024),
        ["--cp_comm_type a2a+p2p: needs two sizes", "product is --cp 8", "--hierarchical_context_parallel_sizes 2 4"],
    ),
    (
        DENSE,
        dict(world_size=8, cp=8, cp_comm_type="a2a+p2p", context_levels=(2, 2), max_length=1024),
        ["--hierarchical_context_parallel_sizes 2 2: needs two sizes"],
    ),
    (
        DENSE,
        dict(world_size=16, cp=16, cp_comm_type="a2a+p2p", context_levels=(8, 2), max_length=1024),
        ["8 heads and 4 key/value heads", "divisible by 8"],
    ),
    (DENSE, dict(world_size=4, ep=2), ["--ep 2: shards experts, but this model is dense", "leave out --ep"]),
    (DENSE, dict(world_size=4, etp=2), ["--etp 2: shards experts"]),
    (
        replace(MOE, expert_bias=True),
        dict(world_size=4, etp=2),
        ["--etp 2: the experts of this model have biases", "--etp 1, and --ep 4"],
    ),
    (MOE, dict(world_size=12, ep=3), ["8 experts are not divisible by 3 expert-parallel ranks", "--ep 4, or --ep 2"]),
    (MOE, dict(world_size=16, ep=16), ["8 experts are fewer than 16", "--ep 8"]),
    (MOE, dict(world_size=4, ep=2, pp=4), ["--ep 2 --pp 4: requires a multiple of 2 x 4 = 8 processes; there are 4"]),
    (MOE, dict(world_size=2, overlap_experts=True), ["between expert-parallel ranks, of which there is one", "--ep 2"]),
    (
        MOE,
        dict(world_size=4, pp=2, ep=2, overlap_experts=True),
        ["needs several model chunks a stage with --pp 2", "--vpp 2"],
    ),
    (
        MOE,
        dict(world_size=2, tp=2, sequence_parallel=False),
        ["--sequence_parallel false", "only with sequence parallelism"],
    ),
    (DENSE, dict(world_size=2, sequence_parallel=True), ["--sequence_parallel true", "--tp is 1"]),
    (
        DENSE,
        dict(world_size=8, tp=2, dp=8),
        ["--dp 8: 8 processes / (tp 2 x pp 1 x cp 1) = 4", "--dp 4, leave out --dp, or use 16 processes"],
    ),
]


@pytest.mark.parametrize(("shape", "asked", "says"), REFUSED)
def test_refusals_name_flag_numbers_and_a_way_out(shape, asked, says):
    problems = layout_problems(shape, LayoutRequest(**asked))
    text = str(LayoutError(problems))
    for part in says:
        assert part in text
    assert all(problem.fix for problem in problems), text


def test_all_mistakes_at_once():
    problems = layout_problems(MOE, LayoutRequest(8, tp=3, pp=5, ep=6, cp=2, max_length=1023, dp=3))
    text = "\n".join(map(str, problems))
    for part in (
        "--tp 3 --cp 2 --pp 5: requires a multiple of 3 x 2 x 5 = 30 processes",
        "--ep 6 --pp 5",
        "8 attention heads",
        "12 layers",
        "--max_length 1023",
        "8 experts",
    ):
        assert part in text
    assert text.count("nearest layout that works") == 1


@pytest.mark.parametrize(
    ("options", "world", "says"),
    [
        (dict(pp=2, vpp=2), 2, ["--vpp 2", "multiples of --pp 2; a step has 1", "--gradient_accumulation_steps 2"]),
        (dict(pp=2, vpp=2, gbs=6), 4, ["a step has 3", "--global_batch_size 8, or --global_batch_size 4"]),
        (dict(gbs=6), 4, ["global_batch_size 6", "is not a multiple of", "4 data-parallel ranks = 4"]),
        (dict(tp=2, pp=2, gbs=6, gradient_accumulation_steps=2), 8, ["batch sizes are inconsistent"]),
    ],
)
def test_batches(options, world, says):
    with pytest.raises(LayoutError) as error:
        layout_for(config(**options), DENSE, world)
    for part in says:
        assert part in str(error.value)


def test_legal_layout():
    layout = layout_for(config(tp=2, pp=2, vpp=3, gradient_accumulation_steps=4, dp=2), DENSE, 8)
    assert (layout.tp, layout.pp, layout.vpp, layout.dp, layout.sequence_parallel) == (2, 2, 3, 2, True)
    custom = layout_for(config(pp=2, gradient_accumulation_steps=2, pipeline_layout="Et*2|t*4|t*4|t*2L"), DENSE, 2)
    assert custom.vpp == 2
    with pytest.raises(LayoutError, match="'x'"):
        layout_for(config(pp=2, pipeline_layout="Ex|tL"), DENSE, 2)


def test_more_tensor_parallel_ranks_than_kv_heads_is_megatrons_to_split():
    assert layout_problems(DENSE, LayoutRequest(8, tp=8)) == []


@pytest.mark.parametrize(
    "asked",
    [
        LayoutRequest(8, tp=3),
        LayoutRequest(8, tp=3, pp=5),
        LayoutRequest(8, pp=8, ep=3),
        LayoutRequest(8, cp=4, max_length=12),
        LayoutRequest(8, vpp=2),
        LayoutRequest(8, pp=8, vpp=2),
        LayoutRequest(6, tp=4, pp=2),
        LayoutRequest(8, tp=2, ep=8, etp=2),
        LayoutRequest(7, tp=2),
        LayoutRequest(8, tp=2, sequence_parallel=False, ep=16),
    ],
)
def test_the_nearest_layout_works_and_none_is_nearer(asked):
    near = nearest_layout(MOE, asked)
    assert list(broken_rule_problems(MOE, near)) == []

    def changes(other):
        names = ("tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel")
        return sum(getattr(other, name) != getattr(asked, name) for name in names)

    sizes = range(1, asked.world_size + 1)
    others = itertools.product(sizes, sizes, (1, 2, 3, 6), sizes, sizes, sizes, {None, asked.sequence_parallel})
    fewest = min(changes(a) for a in _legal(asked, others))
    assert changes(near) == fewest


def _legal(asked, others):
    for tp, pp, vpp, cp, ep, etp, sp in others:
        if asked.world_size % (tp * pp * cp) or asked.world_size % (ep * etp * pp):
            continue
        other = replace(asked, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, sequence_parallel=sp)
        if next(broken_rule_problems(MOE, other), None) is None:
            yield other


def test_nearest_layouts_by_hand():
    assert (
        suggested_layout_flags_text(nearest_layout(DENSE, LayoutRequest(8, tp=3)), LayoutRequest(8, tp=3))
        == "--tp 4 (data parallel: 2)"
    )
    dense = LayoutRequest(8, tp=2, ep=4)
    assert suggested_layout_flags_text(nearest_layout(DENSE, dense), dense) == "--tp 2 --ep 1 (data parallel: 4)"
    split = LayoutRequest(4, pp=4, split=PipelineSplit(first=5))
    assert suggested_layout_flags_text(nearest_layout(DENSE, split), split) == "--pp 4 (data parallel: 1)"
    assert nearest_layout(DENSE, LayoutRequest(4, train=config(gbs=6).train)) == LayoutRequest(
        4, tp=2, train=config(gbs=6).train
    )


def test_a_large_world_is_searched_quickly():
    asked = LayoutRequest(720, tp=7, pp=11, ep=13, etp=17, cp=19, max_length=4096)
    shape = replace(MOE, num_layers=48, heads=32, ffn=12288, experts=128, expert_ffn=768, moe_layers=(True,) * 48)
    assert list(broken_rule_problems(shape, nearest_layout(shape, asked))) == []


def test_shape_of_a_spec():
    transformer = dict(
        num_layers=12,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=8,
        ffn_hidden_size=96,
        num_moe_experts=8,
        moe_ffn_hidden_size=24,
    )
    narrow, wide = (SimpleNamespace(qk_norm_width=width, linear_layers=()) for width in ("head", "all"))
    spec = SimpleNamespace(transformer=transformer, moe_layers=MOE.moe_layers, features=narrow)
    assert ModelShape.of(spec) == MOE and (MOE.dense_layers, DENSE.dense_layers) == (1, 12)
    dense = SimpleNamespace(
        transformer={**transformer, "num_moe_experts": None}, moe_layers=(False,) * 12, features=narrow
    )
    assert ModelShape.of(dense) == DENSE
    assert ModelShape.of(SimpleNamespace(**{**vars(dense), "features": wide})) == replace(DENSE, whole_kv=True)
