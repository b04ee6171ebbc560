"""The norm of gradients keeps its digits on large tensors, and every engine takes it from there."""

import ast
import math

import pytest
import torch
import torch.distributed as dist

from megaswift.engine.squared_norm import sum_of_squares
from megaswift.engine.torch.strategies.strategy import clip_grads_with_norm
from tests.sources import sources

ELEMENTS = 4_000_003


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    """float32 [n], normal, with a few values a thousand times larger, as in a trained model."""
    x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1))
    x[:: ELEMENTS // 20] *= 1000
    return x


def exact(x: torch.Tensor) -> float:
    return float(x.double().square().sum().sqrt())


def test_a_large_tensor_keeps_its_digits(gradient: torch.Tensor) -> None:
    assert float(sum_of_squares([gradient], "cpu").sqrt()) == pytest.approx(exact(gradient), rel=1e-7)
    assert float(gradient.norm()) != pytest.approx(exact(gradient), rel=1e-5), "torch's own norm does too: use it"


def test_shards_add_up_to_the_whole(gradient: torch.Tensor) -> None:
    whole, halves = sum_of_squares([gradient], "cpu"), sum_of_squares(gradient.split(ELEMENTS // 2), "cpu")
    assert float(halves) == pytest.approx(float(whole), rel=2e-7)


@pytest.mark.parametrize("shape", [(0,), (3,), (1024,), (1025,), (33, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_any_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    total = sum_of_squares([x, x.t()[: x.shape[-1] // 2] if x.ndim == 2 else x], "cpu")
    other = x.t()[: x.shape[-1] // 2] if x.ndim == 2 else x
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(exact(x) ** 2 + exact(other) ** 2, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1030])
def test_what_is_not_finite_stays_so(bad: float, place: int) -> None:
    x = torch.ones(1040)
    x[place] = bad
    assert not math.isfinite(float(sum_of_squares([torch.ones(3), x], "cpu")))


def test_no_gradients() -> None:
    assert float(sum_of_squares([], "cpu")) == 0.0


def test_megatron_takes_the_norm_from_here(gradient: torch.Tensor, tmp_path) -> None:
    from megaswift.engine.megatron.cpu.patches import install_cpu_patches

    install_cpu_patches()
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        norm = get_grad_norm_fp32([gradient, gradient[:10]], grad_stats_parallel_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert norm == pytest.approx(math.hypot(exact(gradient), exact(gradient[:10])), rel=2e-7)


@pytest.mark.wide
def test_no_engine_calls_the_inaccurate_functions() -> None:
    names = {"get_total_norm", "clip_grad_norm_", "clip_grads_with_norm_"}
    for source in sources(folders=("megaswift",)):
        for node in source.nodes:
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert name not in names, f"{source.path}: {name} loses digits on a CPU; use engine/squared_norm.py"


@pytest.mark.parametrize(("limit", "factor"), [(0.0, 1.0), (10.0, 1.0), (5.0, 1.0), (1.0, 0.2), (0.5, 0.1)])
def test_gradients_are_scaled_down_to_the_limit_only(limit: float, factor: float) -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    clip_grads_with_norm(gradients, 5.0, limit)
    assert torch.allclose(
        torch.stack([g.flatten()[0] for g in gradients]), factor * torch.tensor([3.0, 4.0]), rtol=1e-6
    )
