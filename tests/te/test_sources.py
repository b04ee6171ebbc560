"""Transformer Engine's sources still have what the test device replaces, edits and calls by position."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.parity.pool import ROOT
from tests.te import registry, sources
from tests.te.device import KERNEL_FILES
from tests.te.kernels_attention import _NAMES, _NEWER

pytestmark = pytest.mark.wide
for name in KERNEL_FILES:
    importlib.import_module(f"tests.te.kernels_{name}")

ONE_RELEASE = {
    "create_empty_quantized_tensor",
    "thd_cp_rank_order_to_sequence_order",
    "thd_sequence_order_to_cp_rank_order",
    "thd_get_partitioned_indices",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
}
"""Stand-ins that only one of the releases, or Megatron-Core alone, calls."""


@cache
def files(release: str) -> dict[str, str]:
    """Module -> source, of the PyTorch part."""
    root = sources.wheel_folder(release)
    found = {}
    for path in sorted((root / sources.PACKAGE).rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if ".jax" not in module:
            found[module] = path.read_text()
    return found


@cache
def tree(release: str, module: str) -> ast.Module:
    """Its syntax tree."""
    return ast.parse(files(release)[module])


def test_the_environment_has_these_releases() -> None:
    """The wheels of the tests are the ones that the environment's script unpacks."""
    script = (ROOT / "scripts" / "setup_env.sh").read_text()
    assert f'TRANSFORMER_ENGINE="{" ".join(sources.RELEASES)}"' in script
    assert all((sources.wheel_folder(r) / sources.PACKAGE).is_dir() for r in sources.RELEASES)


@pytest.mark.parametrize("release", sources.RELEASES)
def test_replaced_functions_exist(release: str) -> None:
    """Each Python function that is replaced is defined where the table says."""
    for symbol in {**registry.REPLACED, **registry.WRAPPED}:
        if registry.OF_RELEASE.get(symbol, release) != release:
            continue
        module, _, name = symbol.partition(":")
        defined = {n.name for n in tree(release, module).body if isinstance(n, ast.FunctionDef)}
        assert name in defined, f"Transformer Engine {release} has no {symbol}"


@pytest.mark.parametrize("release", sources.RELEASES)
def test_kernels_are_called(release: str) -> None:
    """Each stand-in's name occurs in the sources as the compiled module's."""
    text = "\n".join(files(release).values())
    imported = set(
        re.findall(r"\b\w+\b", " ".join(re.findall(r"from transformer_engine_torch import \(?([^)]*?)\)", text)))
    )
    named = set(re.findall(r"\btex\.(\w+)", text)) | imported
    unused = {name for name in registry.KERNELS if name not in named}
    assert unused <= ONE_RELEASE | {"get_cudnn_version"}, f"{release} does not call {sorted(unused)}"


@pytest.mark.parametrize("release", sources.RELEASES)
def test_every_member_of_an_enumeration_exists(release: str) -> None:
    """What the sources name as `tex.NVTE_Mask_Type.X` has a number."""
    text = "\n".join(files(release).values())
    backends = {f"NVTE_{word}" for word in registry.BACKENDS[release].split()}
    for enumeration, member in set(re.findall(r"\b(?:tex\.)?(NVTE_\w+|CommOverlapType|FP8\w+Tensors)\.(\w+)", text)):
        known = backends if enumeration == "NVTE_Fused_Attn_Backend" else registry.ENUMERATIONS[enumeration].__members__
        assert member in known or member.startswith("__"), f"{release}: {enumeration}.{member}"


@pytest.mark.parametrize("release", sources.RELEASES)
def test_every_edit_applies(release: str) -> None:
    """Each kind of edit is still made somewhere: one that is not can go."""
    made: Counter[str] = Counter()
    for module, text in files(release).items():
        if any(part in module for part in (".module.", ".attention.", ".triton.", ".onnx_extensions")):
            made += sources.edited(text.encode(), module)[1]
    assert set(made) == set(sources.EDITS), made


@pytest.mark.parametrize("release", sources.RELEASES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_is_called_with_these_arguments(release: str, direction: str) -> None:
    """As many as the list of names: Transformer Engine passes them by position."""
    names = (_NAMES if release == "2.12.0" else _NEWER)[direction].split()
    called = f"fused_attn_{direction[0]}wd" if direction == "forward" else "fused_attn_bwd"
    module = f"{sources.PACKAGE}.pytorch.cpp_extensions.fused_attn"
    calls = [
        node
        for node in ast.walk(tree(release, module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == called
    ]
    assert [len(call.args) for call in calls] == [len(names)]


def test_an_edit_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source without any CUDA: no edit is made."""
    changed, made = sources.edited(
        b"x = torch.empty(2, device='cuda') if y.is_cuda else torch.cuda.current_device()", "m"
    )
    assert made == {"device": 1, "is_cuda": 1, "torch.cuda": 1}
    assert (
        ast.unparse(changed) == "x = torch.empty(2, device='cpu') if y.is_cpu else _test_device_cuda.current_device()"
    )
    assert not sources.edited(b"x = torch.empty(2)", "m")[1]


def test_a_missing_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that unpacks it is in the message."""
    from tests.te.device import install

    monkeypatch.setenv("MEGASWIFT_TE_WHEELS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="setup_env.sh --dev"):
        install()
