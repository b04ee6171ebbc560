"""Commands that ms-swift starts as `megatron COMMAND`."""

import pytest

from megaswift.cli import main


def test_ms_swift_s_megatron_commands(capsys):
    """`megatron sft` is sft; without a command of training the answer names them."""
    assert main(["megatron", "sft", "--help"]) == 0 and "--tensor_parallel_size" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["megatron", "pt", "--nothing_like_it", "1"])
    assert "megaswift pt --help all lists them" in capsys.readouterr().err
    assert main(["megatron", "export"]) == 2 and "megaswift convert" in capsys.readouterr().err
