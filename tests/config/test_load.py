"""Files, command lines and Python give the same configuration; every mistake is told, all at once, as it was
written.

Covers: megaswift/config/resolve.py, megaswift/options/given_options.py, megaswift/options/sources.py,
megaswift/options/files.py, megaswift/options/command_line.py, megaswift/config/swift_config.py.
"""

import json
import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.engine_checks import requested_engine
from megaswift.errors import ConfigError
from megaswift.options.tasks import RL
from megaswift.trainers.rl.options.generation_batch import generation_batch_plan
from megaswift.version import __version__


def refused(*argv: str, task: str | None = "sft", complete: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(task, list(argv), complete, environ={})
    return str(caught.value)


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_flat_sections_json_flags_and_python_agree(tmp_path: Path) -> None:
    flat = write(tmp_path, "lr: 1e-4\ntp: 4\ndataset: [a.jsonl, 'b.jsonl#5']\npacking: yes\ncolumns: {q: query}\n")
    nested = write(
        tmp_path,
        "optim: {learning-rate: 0.0001}\nparallel:\n  tp: 4\ntraining: {packing: true}\n"
        "data:\n  datasets:\n  - a.jsonl\n  - b.jsonl#5\n  columns:\n    q: query\n",
        "nested.yml",
    )
    values = {
        "lr": 1e-4,
        "parallel": {"tensor_model_parallel_size": 4},
        "dataset": ["a.jsonl", "b.jsonl#5"],
        "packing": True,
        "columns": {"q": "query"},
    }
    as_json = write(tmp_path, json.dumps(values), "run.json")
    flags = [
        "--lr=1e-4",
        "--tensor-parallel-size",
        "4",
        "--dataset",
        "a.jsonl",
        "b.jsonl#5",
        "--packing",
        "--columns",
        "q=query",
    ]
    configs = [
        load_config("sft", [flat]),
        load_config("sft", ["--config", nested]),
        load_config("sft", [as_json]),
        load_config("sft", flags),
        SwiftConfig(**values),
    ]
    assert all(c == configs[0] and c.given == configs[0].given for c in configs)
    assert configs[0].optim.learning_rate == 1e-4 and configs[0].parallel.tensor_parallel_size == 4
    assert (
        configs[0].data.dataset == ("a.jsonl", "b.jsonl#5")
        and configs[0].data.packing
        and configs[0].data.columns == {"q": "query"}
    )


def test_flags_override_the_file_under_any_spelling(tmp_path: Path) -> None:
    path = write(tmp_path, "lr: 1e-4\ndataset: a\nmax_steps: 5\n")
    cfg = load_config("sft", [path, "--learning_rate", "2e-5", "--datasets", "b", "c", "--train_iters", "none"])
    assert (cfg.optim.learning_rate, cfg.data.dataset, cfg.train.max_steps) == (2e-5, ("b", "c"), None)
    assert "max_steps" not in cfg.given


RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
"""What every launcher sets."""


def test_launch_from_the_environment_stands_between_file_and_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "nproc_per_node: 2\nnnodes: 1\n")
    cfg = load_config("sft", [path, "--nnodes", "1"], environ={"NPROC_PER_NODE": "4", "NNODES": "9"})
    assert (cfg.launch.nproc_per_node, cfg.launch.nnodes) == (4, 1)
    worker = load_config("sft", [path], environ={"NPROC_PER_NODE": "4", **RANKS, "MASTER_PORT": "1"})
    assert (worker.launch.nproc_per_node, worker.launch.master_port) == (2, None)


def test_a_cluster_s_stray_variables_are_no_mistake() -> None:
    cfg = load_config("sft", [], environ={"MASTER_ADDR": "h", "MASTER_PORT": "1", "NODE_RANK": "3"})
    assert not cfg.given


def test_all_mistakes_at_once_each_as_written(tmp_path: Path) -> None:
    path = write(tmp_path, "tp: 0\n\nlearnin_rate: 1\noptim:\n  min_lr: 1e-6\n  lr_scheduler_type: constant\n")
    text = refused(
        path,
        "--max-steps",
        "1.5",
        "--pp",
        "2",
        "--pipeline_parallel_size",
        "4",
        "--attn_impl",
        "flsh",
        "--packing=maybe",
        "--nosuch",
        "7",
        "--gbs",
        "7",
        "--micro_batch_size",
        "2",
        "stray",
        complete=True,
    )
    for part in (
        f"{path}:1 tp: 0: must be >= 1",
        f"{path}:3 learnin_rate: 1: is not an option\n    try: did you mean learning_rate?",
        f"{path}:5 min_lr: 1e-6: would be ignored",
        "--max-steps 1.5: must be an integer\n    try: --max_steps 2",
        "--pipeline_parallel_size 4: conflicts with --pp 2",
        "--attn_impl flsh: must be one of auto | flash",
        "did you mean flash?",
        "--packing maybe: must be true or false",
        "--nosuch 7: is not an option",
        "--gbs 7: is not a multiple of per_device_train_batch_size 2\n    try: --global_batch_size 8",
        "stray: is an unexpected argument",
        "--model: is missing",
        "--dataset: is missing",
    ):
        assert part in text, part
    assert "(12 problems)" in text


def test_the_last_of_two_values_counts() -> None:
    """As in other programs, so that options can be added behind those of a script."""
    cfg = load_config("sft", ["--lr", "1e-4", "--tp", "2", "--lr", "2e-4"], False, environ={})
    assert cfg.optim.learning_rate == 2e-4
    assert "--lr is given several times; its last value counts" in cfg.notices


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--lr", "abc"], "--lr abc: must be a number"),
        (["--lr", "nan"], "must be a finite number"),
        (["--lr", "0"], "must be > 0"),
        (["--warmup_ratio", "1"], "must be >= 0 and < 1"),
        (["--master_port", "70000"], "try: --master_port 65535"),
        (["--lr"], "--lr: has no value"),
        (["--dataset"], "--dataset: has no value"),
        (["--lr", "1", "2"], "2: is an unexpected argument (--lr takes one value)"),
        (["--no-shuffle"], "try: --shuffle false"),
        (["--fp4"], "is not supported: FP4"),
        (["--tensor_paralel_size", "2"], "did you mean tensor_parallel_size?"),
        (["--train_type", "longlora"], "must be one of full | lora | qlora"),
        (
            ["--report_to", "wandb", "wandbb"],
            "--report_to wandb wandbb: wandbb must be one of tensorboard | wandb | swanlab | mlflow | trackio | "
            "prometheus\n    try: did you mean",
        ),
        (["--train_type", "dpo"], "conflicts with the command, which is sft\n    try: megaswift dpo"),
        (["--rlhf_type", "xpo"], "is not a supported task; tasks are sft"),
        (["--train_type", "pt"], "conflicts with the command, which is sft\n    try: megaswift pt"),
        (["--columns", "{q"], "is not JSON"),
        (["--columns", "q"], "must be FROM=TO pairs"),
        (["--config"], "--config: has no value"),
        (["a.yaml", "--config", "b.yaml"], "no such file"),
        (
            ["d.jsonl", "--model", "DIR"],
            "d.jsonl: is not a configuration file (YAML or JSON)\n    try: --dataset d.jsonl",
        ),
        (
            ["--model", "DIR", "d.jsonl"],
            "d.jsonl: is an unexpected argument (--model takes one value)\n    try: --dataset d.jsonl",
        ),
    ],
)
def test_wrong_flags(argv: list[str], part: str) -> None:
    assert part in refused(*argv)


@pytest.mark.parametrize(
    "text, part",
    [
        ("lr: 1\nlr: 2\n", ":2 lr: 2: occurs twice in the file"),
        ("lr: 1\nlearning_rate: 2\n", ":1 lr: 1 (both set learning_rate)"),
        ("optim: {lr: 1}\nlr: 2\n", "conflicts with"),
        (
            "placement: 2\n",
            "placement: 2: is a section, and no option\n    try: options of the section, indented, below it",
        ),
        ("paralel:\n  tp: 2\n  pp: 2\n", "paralel: is not a section of options; sections are model"),
        ("kt_config:\n  a: 1\n", "try: leave it out: megaswift does not support KTransformers"),
        (
            "peft:\n  r: 8\n  x: {y: 1}\nmy_options: {a: 1}\n",
            "my_options: is not a section of options; sections are model",
        ),
        ("my_options: {a: 1}\n", "try: leave the mapping out; options stand at the top level or in these sections"),
        ("device_groups: {nproc_per_node: 8}\n", "try: --nproc_per_node N; for samplers on GPUs of their own"),
        ("lr: [1, 2]\n", "takes one value"),
        ("packing: 3\n", "must be true or false"),
        ("max_steps: true\n", "must be a number"),
        ("lr: {a: 1}\n", "must be a number"),
        ("- lr\n", "must contain `name: value` entries"),
        ("lr: 'a\n", "is not YAML"),
        ("lr: !!python/object:os.system 1\n", "is not YAML"),
        ("task: pt\n", "task: pt: conflicts with the command, which is sft"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, part: str) -> None:
    assert part in refused(write(tmp_path, text))


def test_wrong_json_says_where(tmp_path: Path) -> None:
    assert "run.json:2: is not JSON" in refused(write(tmp_path, '{"lr": 1,\n lr: 2}', "run.json"))
    assert "occurs twice" in refused(write(tmp_path, '{"lr": 1, "lr": 2}', "run.json"))
    assert "did you mean run.json?" in refused(str(tmp_path / "run.jsn"))
    assert "is a folder" in refused(str(tmp_path))


def test_a_task_given_as_train_type_is_taken_with_a_notice() -> None:
    cfg = load_config("sft", ["--tuner_type", "sft"], environ={})
    assert cfg.model.train_type == "full" and "used as rlhf_type" in cfg.notices[0]
    assert load_config(None, ["--train_type", "pt"], environ={}).task == "pt"


def test_empty_and_unset_entries(tmp_path: Path) -> None:
    cfg = load_config("sft", [write(tmp_path, "parallel:\nmax_steps:\nreport_to: none\n")])
    assert cfg.trackers.report_to == () and not cfg.given - {"report_to"}


def test_lists(tmp_path: Path) -> None:
    cfg = load_config("sft", ["--dataset", "a", "--dataset", "b,c", "d", "--report_to", "tensorboard,wandb"])
    assert cfg.data.dataset == ("a", "b,c", "d") and cfg.trackers.report_to == ("tensorboard", "wandb")


def test_a_list_is_emptied_by_none_on_the_command_line_too(tmp_path: Path) -> None:
    lora = ["--train_type", "lora", "--target_parameters", "a"]
    file = write(tmp_path, "target_modules: []\ntrain_type: lora\ntarget_parameters: a\n")
    want = load_config("sft", [file]).lora
    assert want.target_modules == () and want.target_parameters == ("a",)
    assert (
        load_config("sft", [*lora, "--target_modules", "none"]).lora
        == want
        == load_config("sft", [file, "--target_modules=None"]).lora
    )


def test_numbers_as_people_write_them() -> None:
    cfg = load_config(
        "sft", ["--max_steps", "1e3", "--min_lr=0", "--seed", "9007199254740993", "--system", "- be brief"]
    )
    assert cfg.train.max_steps == 1000 and cfg.train.seed == 9007199254740993 and cfg.data.system == "- be brief"
    assert SwiftConfig(dtype="BF16", lr_scheduler_type="WSD").model.torch_dtype == "bfloat16"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_steps": 3, "warmup_steps": 1},
        {"warmup_ratio": 0.1, "lr_scheduler_type": "wsd"},
        {"optimizer": "sgd", "tp": 2},
        {"task": "pt", "truncation_strategy": "split", "pp": 2, "vpp": 2, "val_dataset": ["v"], "eval_steps": 5},
        {
            "dataset": ["a"],
            "columns": {"a": "b"},
            "streaming": True,
            "max_steps": 9,
            "recompute_granularity": "full",
            "cp": 2,
        },
    ],
)
def test_a_written_configuration_repeats_the_run(tmp_path: Path, options: dict) -> None:
    cfg = SwiftConfig(**options)
    assert SwiftConfig.from_dict(cfg.to_dict()) == cfg
    again = load_config(None, [write(tmp_path, cfg.to_yaml())], environ={})
    assert again == cfg and again.to_dict() == cfg.to_dict()
    assert pickle.loads(pickle.dumps(cfg)) == cfg


def test_replace_and_frozen() -> None:
    cfg = SwiftConfig(tp=2, max_steps=5)
    other = cfg.replace(lr=0.5, max_steps=None, parallel={"pp": 2})
    assert (other.parallel.tensor_parallel_size, other.parallel.pipeline_parallel_size, other.train.max_steps) == (
        2,
        2,
        None,
    )
    assert cfg.train.max_steps == 5 and SwiftConfig(train=other.train, optim=other.optim).optim.learning_rate == 0.5
    eight = load_config("sft", ["--deepspeed", "zero2"], environ={"NPROC_PER_NODE": "8"})
    assert eight.replace(engine="zero2").launch == eight.launch and eight.replace(engine="zero2").given == {
        "deepspeed",
        "engine",
    }
    with pytest.raises(FrozenInstanceError):
        cfg.task = "pt"  # type: ignore[misc]
    with pytest.raises(ConfigError, match="lr='x'"):
        cfg.replace(lr="x")


EXAMPLES = sorted((Path(__file__).parents[2] / "configs").glob("*/*.yaml"))
SIZE = re.compile(r"([\d.]+) x ([\d.]+) B(?: / (\d+))? = ([\d.]+) GB")
"""`16 x 7 B / 8 = 14 GB`: bytes a parameter, billions of parameters, on so many GPUs."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_examples_run_as_pasted(path: Path) -> None:
    """Complete but for the model and the data, which the command in the first lines gives."""
    text = path.read_text()
    command = next(line for line in text.splitlines() if "megaswift " in line and line.startswith("#"))
    task, *argv = command.split("megaswift ", 1)[1].split()
    environ = dict(word.split("=") for word in command.split("megaswift ")[0].split() if "=" in word)
    cfg = load_config(task, [str(path), *argv[1:]], complete=True, environ=environ)
    p, dp = cfg.parallel, cfg.parallel.data_parallel_size
    world = (cfg.launch.nproc_per_node or 1) * (cfg.launch.nnodes or 1)
    assert (
        path.parent.name in (task, cfg.task, "fallback", "ray", "by_size")
        and f"configs/{path.parent.name}/{path.name}" == argv[0]
    )
    assert dp is None or dp * p.tensor_parallel_size * p.pipeline_parallel_size * p.context_parallel_size == world
    if task in RL:
        assert generation_batch_plan(cfg, dp or world).steps >= 1
    if path.parent.name == "ray":
        assert cfg.launch.launcher == "ray" and cfg.launch.num_workers
    for each, billions, parts, said in SIZE.findall(text):
        assert not parts or int(parts) == world
        assert float(said) == pytest.approx(float(each) * float(billions) / int(parts or 1), rel=0.02)


def test_the_examples_cover_every_engine() -> None:
    """Small, middle and large; the arithmetic of each is in its comments."""
    folder = [path for path in EXAMPLES if path.parent.name == "fallback"]
    engines = {path.name: requested_engine(load_config("sft", [str(path)])) for path in folder}
    assert set(engines.values()) >= {"auto", "ddp", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2"}
    assert {name.split("_")[0] for name in engines} == {"auto.yaml", "small", "middle", "large"}
    assert all(SIZE.search(path.read_text()) for path in folder if path.name != "auto.yaml")


@pytest.mark.parametrize("name, fix", [("eval_rows", "--val_dataset"), ("learnin_rate", "did you mean learning_rate?")])
def test_a_data_set_as_the_value_of_a_keyword_is_shortened(name: str, fix: str) -> None:
    rows = [{"messages": [{"role": "user", "content": "x" * 500}]}] * 5000
    with pytest.raises(ConfigError) as error:
        SwiftConfig(**{name: rows})
    text = str(error.value)
    assert f"{name}=[" in text and "...: is not an option" in text and fix in text and len(text) < 500
    with pytest.raises(ConfigError) as error:
        SwiftConfig(max_length=rows, output_dir=None, lora_rank="a" * 9999)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("written", "notice"),
    [
        ("", "written by an earlier version of megaswift"),
        (" 0.0.9", "written by megaswift 0.0.9"),
        (f" {__version__}", None),
    ],
)
def test_the_config_yaml_of_another_version_is_read_and_says_so(
    tmp_path: Path, written: str, notice: str | None
) -> None:
    """An option's former names go on counting."""
    header = f"# The resolved configuration of this run, written by megaswift{written}.\n"
    path = write(tmp_path, header + "task: sft\noptim: {lr: 3.0e-05}\nparallel: {tp: 2}\n")
    cfg = load_config("sft", [path], environ={})
    assert (cfg.optim.learning_rate, cfg.parallel.tensor_parallel_size) == (3e-5, 2)
    found = [line for line in cfg.notices if "written by" in line]
    assert found == (
        []
        if notice is None
        else [f"{path}: {notice}, read by {__version__}; options that it does not contain take their current defaults"]
    )
