"""The YAML file of --tp_comm_overlap_cfg: what is read, and one message for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.engine.options.tp_overlap_file import PRODUCTS, SETTINGS, read_tp_comm_overlap_cfg
from megaswift.errors import ConfigError
from tests.te.sources import PACKAGE, RELEASES, wheel_folder


def test_settings_are_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "overlap.yaml"
    path.write_text("qkv_fprop: {num_sm: 2, set_sm_margin: false}\nproj_fprop:\n  method: ring_exchange\n")
    assert read_tp_comm_overlap_cfg(str(path)) == {
        "qkv_fprop": {"num_sm": 2, "set_sm_margin": False},
        "proj_fprop": {"method": "ring_exchange"},
    }
    path.write_text("")
    assert read_tp_comm_overlap_cfg(str(path)) == {} == read_tp_comm_overlap_cfg(None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "is not a mapping"),
        ("fc3_fprop: {num_sm: 1}", "fc3_fprop: is not a matrix product"),
        ("fc1_fprop: 3", "fc1_fprop: is not a matrix product"),
        ("fc1_fprop: {sms: 1}", "fc1_fprop.sms: is not a setting"),
        ("fc1_fprop: {method: fast}", "method fast: is not a method"),
        ("fc1_fprop: {num_sm: true}", "num_sm True: is not of type int"),
        ("fc1_fprop: {use_ce: 1}", "use_ce 1: is not of type bool"),
        ("a: [", "is not YAML"),
    ],
)
def test_mistakes(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "overlap.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_tp_comm_overlap_cfg(str(path))
    assert said in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_tp_comm_overlap_cfg(str(tmp_path / "none.yaml"))


@pytest.mark.wide
@pytest.mark.parametrize("release", RELEASES)
def test_names_are_transformer_engines(release: str) -> None:
    """Every product and setting is named in the function that takes them."""
    source = (wheel_folder(release) / PACKAGE / "pytorch" / "module" / "base.py").read_text()
    body = source[source.index("def initialize_ub(") : source.index("def get_ub(")]
    assert all(f'"{name}"' in body for name in PRODUCTS)
    assert all(f'"{name}"' in body for name in SETTINGS)
