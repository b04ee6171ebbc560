"""What stands between two turns of a rollout, against transformers' rendering of the whole conversation.

Covers: megaswift/trainers/rl/multi_turn.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megaswift.data.prompts.source import Prompt
from megaswift.errors import RewardError
from megaswift.rollout.sampler import Completion, SamplingParams
from megaswift.run.policy_task import build_multi_turn
from tests.data.chat_template_kinds import TemplateKind, all_kinds, jinja
from tests.trainers.rl.makers import config

ENVIRONMENT = """
import json

class Asks:
    role, first = "user", None

    def reset(self, prompt, **columns):
        self.turn = 0
        return columns.get("first")

    def step(self, answer):
        self.turn += 1
        return [{"role": self.role, "content": f"wkanswer{self.turn}"}], 0.5, self.turn == 3

class Tool(Asks):
    role = "tool"
"""
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
    "{{ '<|message|>' + m.content }}"
    "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}{{ '<|return|>' }}"
    "{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ALWAYS = (
    "{% for m in messages %}{{ '<|sh|>' + m.role + '<|eh|>' + m.content + '<|eot|>' }}{% endfor %}"
    "{{ '<|sh|>assistant<|eh|>' }}"
)
SPECIAL = re.compile(
    r"<\|[a-z_]+\|>|</?s>|\[/?[A-Z]+\]|<(?:start|end)_of_turn>|<sop>|<eos>|\[gMASK\]|<[|｜][^<>\s']{1,30}[|｜]>"
)


def tokenizer_for(template: str, *more: str, eos: str, rstrip: bool = False) -> PreTrainedTokenizerFast:
    """Of bytes, with the special tokens that stand in a template. `rstrip`: they take white space behind them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["a"], trainers.BpeTrainer(vocab_size=257, special_tokens=["<pad>"], initial_alphabet=alphabet)
    )
    specials = sorted({*SPECIAL.findall(template), *more, eos, "<s>"})
    made.add_special_tokens([AddedToken(t, special=True, rstrip=rstrip) for t in specials])
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token=eos, pad_token="<pad>")
    found.chat_template = template
    return found


class Scripted:
    """A sampler that says what it is given, then the token that ends a turn."""

    def __init__(self, tokenizer: Any, end: str) -> None:
        self.tokenizer, self.end, self.turn = tokenizer, end, 0

    def generate(self, prompts: Any, sampling: SamplingParams, seeds: Any) -> list[Completion]:
        self.turn += 1
        ids = self.tokenizer(f"zqturn{self.turn}{self.end}", add_special_tokens=False)["input_ids"]
        return [Completion(tuple(ids), (-0.5,) * len(ids), True)] * len(prompts)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "asks.py"
    file.write_text(ENVIRONMENT, encoding="utf-8")
    return file


def talked(tokenizer: Any, environment: Path, end: str, name: str = "Asks", **columns: Any) -> tuple[list[int], Any]:
    """The prompt's tokens and a conversation of three turns."""
    asked = ({"role": "user", "content": "wkquestion"},)
    ids = tokenizer.apply_chat_template(list(asked), add_generation_prompt=True)["input_ids"]
    runner: Any = build_multi_turn(config(environment=f"{environment}:{name}"), tokenizer)
    stop = tokenizer.convert_tokens_to_ids(end)
    sampling = SamplingParams(1000, stop_token_ids=(stop,))
    prompt = Prompt(0, tuple(ids), asked, columns)
    return ids, runner.write(Scripted(tokenizer, end), sampling, [prompt], [1])[0]


def between(tokenizer: Any, talk: Any) -> list[str]:
    """The text from the token that ended a turn to the next turn, for each turn but the last."""
    parts: list[list[int]] = [[]]
    for i, (token, own) in enumerate(zip(talk.token_ids, talk.own, strict=True)):
        if not own:
            parts[-1] += [talk.token_ids[i - 1], token] if talk.own[i - 1] else [token]
        elif parts[-1]:
            parts.append([])
    return [tokenizer.decode(part) for part in parts if part]


def wanted(tokenizer: Any, talk: Any, turn: int) -> str:
    """What the template writes behind the content of a turn where the conversation goes on."""
    said = [{"role": "user", "content": "wkquestion"}, *talk.messages[: 2 * turn]]
    whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return whole.rpartition(f"zqturn{turn}")[2]


def check(tokenizer: Any, environment: Path, end: str, stands_for: str = "", name: str = "Asks") -> Any:
    """Both boundaries are the template's; the model's `end` may stand for the template's token."""
    _, talk = talked(tokenizer, environment, end, name)
    found = between(tokenizer, talk)
    assert len(found) == 2 and talk.turns == 3
    for turn, text in enumerate(found, 1):
        own = text if not stands_for else text.replace(end, stands_for, 1)
        assert own == wanted(tokenizer, talk, turn)
    return talk


CASES = {
    "phi": (PHI, "<|endoftext|>", "<|end|>", ""),
    "phi, ended by its end of text": (PHI, "<|endoftext|>", "<|endoftext|>", "<|end|>"),
    "phi, ended by the next header": (PHI, "<|endoftext|>", "<|assistant|>", "<|end|>"),
    "glm": (GLM, "<|endoftext|>", "<|user|>", ""),
    "gemma": (GEMMA, "<eos>", "<end_of_turn>", ""),
    "gemma, ended by eos": (GEMMA, "<eos>", "<eos>", "<end_of_turn>"),
    "gpt-oss": (HARMONY, "<|return|>", "<|return|>", "<|end|>"),
    "always a generation prompt": (ALWAYS, "<|eot|>", "<|eot|>", ""),
    "always a generation prompt, another end": (ALWAYS, "<|eot|>", "<|eom|>", "<|eot|>"),
}


@pytest.mark.parametrize("case", CASES)
def test_boundaries_of_model_families(case: str, environment: Path) -> None:
    template, eos, end, stands_for = CASES[case]
    talk = check(tokenizer_for(template, end, eos=eos), environment, end, stands_for)
    assert talk.rewritten == (2 if stands_for else 0)


def test_an_end_that_the_template_does_not_write_stays_before_all_that_it_writes(environment: Path) -> None:
    tokenizer = tokenizer_for(GLM, eos="<|endoftext|>")
    _, talk = talked(tokenizer, environment, "<|endoftext|>")
    assert between(tokenizer, talk) == [f"<|endoftext|><|user|>\nwkanswer{i}<|assistant|>\n" for i in (1, 2)]
    assert talk.rewritten == 2


def test_white_space_before_the_end_is_not_written_behind_it(environment: Path) -> None:
    tokenizer = tokenizer_for(LLAMA, eos="</s>")
    _, talk = talked(tokenizer, environment, "</s>")
    assert between(tokenizer, talk) == [f"</s><s>[INST] wkanswer{i} [/INST]" for i in (1, 2)]


def test_tokens_are_those_behind_the_end_token(environment: Path) -> None:
    """Phi's special tokens take the line end behind them, wherever the text was cut."""
    tokenizer = tokenizer_for(PHI, eos="<|endoftext|>", rstrip=True)
    prompt, talk = talked(tokenizer, environment, "<|end|>")
    said = [{"role": "user", "content": "wkquestion"}, *talk.messages[:4]]
    whole = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    assert [*prompt, *talk.token_ids][: len(whole)] == whole


@pytest.mark.wide
@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.name)
def test_every_kind_of_template(kind: TemplateKind, environment: Path) -> None:
    """Token for token `apply_chat_template` of the whole conversation."""
    template = jinja(kind)
    end = {"chatml": "<|im_end|>", "header": "<|eot_id|>"}.get(kind.frame, "</s>")
    tokenizer = tokenizer_for(template, eos=end)
    for name in ("Asks", "Tool"):
        prompt, talk = talked(tokenizer, environment, end, name)
        if kind.thinking == "empty" and name == "Tool":  # an empty block in turns that the model wrote without one
            assert talk.rewritten == 2
            assert between(tokenizer, talk) == [wanted(tokenizer, talk, turn) for turn in (1, 2)]
            continue
        said = [{"role": "user", "content": "wkquestion"}, *talk.messages[:4]]
        whole = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
        assert [*prompt, *talk.token_ids][: len(whole)] == whole and not talk.rewritten


def trl_templates() -> dict[str, str]:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations))) / "chat_templates"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|eot|>",
    "<|END_OF_TURN_TOKEN|>",
)


LATER = (
    "{% for m in messages %}{% if m.role != 'tool' or loop.index0 < 3 %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}{{ '<|assistant|>' }}"
)
EARLIER = (
    "{% for m in messages if m.role != 'assistant' %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% for m in messages if m.role == 'assistant' %}{{ '<|assistant|>' + m.content + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' }}"
)


@pytest.mark.parametrize(("template", "name", "role"), [(LATER, "Tool", "tool"), (EARLIER, "Asks", "user")])
def test_a_template_that_omits_a_later_message_or_writes_it_elsewhere(
    template: str, name: str, role: str, environment: Path
) -> None:
    """The first result of a tool is written, the second is not; or questions stand before all answers."""
    tokenizer = tokenizer_for(template, "<|tool|>", eos="<|end|>")
    with pytest.raises(RewardError, match=f"it omits messages of the role {role}"):
        talked(tokenizer, environment, "<|end|>", name)


@pytest.mark.wide
@pytest.mark.parametrize("name", trl_templates())
def test_published_templates(name: str, environment: Path) -> None:
    """Those that TRL carries: exact, or one token of the model's for one of the template's."""
    template = trl_templates()[name]
    end = next((e for e in (*ENDS, "<｜end▁of▁sentence｜>", "<end_of_utterance>") if e in template), "</s>")
    if name.startswith("glm"):
        end = "<|user|>"
    tokenizer = tokenizer_for(template, *ENDS, "<end_of_utterance>", eos=end)
    try:
        _, talk = talked(tokenizer, environment, end)
    except RewardError as error:
        pytest.skip(str(error))
    for turn, text in enumerate(between(tokenizer, talk), 1):
        rest = wanted(tokenizer, talk, turn)
        if not SPECIAL.sub("", rest.partition(end)[0]).strip() and end in rest:  # Cohere's has two tokens
            assert text == end + rest.partition(end)[2]
        else:
            assert text.removeprefix(end) in (rest, rest.partition("<|end|>")[2]) and talk.rewritten


def test_reasoning_that_the_template_drops_stays_in_the_tokens(environment: Path) -> None:
    template = trl_templates()["qwen3"]
    tokenizer = tokenizer_for(template, eos="<|im_end|>")

    class Thinks(Scripted):
        def generate(self, prompts: Any, sampling: SamplingParams, seeds: Any) -> list[Completion]:
            self.turn += 1
            text = f"<think>\nso {self.turn}\n</think>\n\nzqturn{self.turn}<|im_end|>"
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return [Completion(tuple(ids), (-0.5,) * len(ids), True)] * len(prompts)

    asked = ({"role": "user", "content": "wkquestion"},)
    ids = tokenizer.apply_chat_template(list(asked), add_generation_prompt=True)["input_ids"]
    for name, rewritten in (("Asks", 2), ("Tool", 0)):  # reasoning before a tool's result stays
        runner: Any = build_multi_turn(config(environment=f"{environment}:{name}"), tokenizer)
        sampling = SamplingParams(2000, stop_token_ids=(tokenizer.eos_token_id,))
        talk = runner.write(Thinks(tokenizer, ""), sampling, [Prompt(0, tuple(ids), asked, {})], [1])[0]
        assert tokenizer.decode(talk.token_ids).count("<think>") == 3
        assert [text == wanted(tokenizer, talk, i) for i, text in enumerate(between(tokenizer, talk), 1)] == [
            True,
            True,
        ]
        assert talk.rewritten == rewritten


@pytest.mark.parametrize(
    ("first", "asked"),
    [
        (" and this", [{"role": "user", "content": "wkquestion and this"}]),
        (
            [{"role": "user", "content": "also"}],
            [{"role": "user", "content": "wkquestion"}, {"role": "user", "content": "also"}],
        ),
        ([" and that", {"seed": 3}], [{"role": "user", "content": "wkquestion and that"}]),
        (None, [{"role": "user", "content": "wkquestion"}]),
        ("", [{"role": "user", "content": "wkquestion"}]),
        ([], [{"role": "user", "content": "wkquestion"}]),
    ],
    ids=["text", "messages", "gymnasium", "none", "empty", "no messages"],
)
def test_the_first_observation_is_part_of_the_prompt(first: Any, asked: Any, environment: Path) -> None:
    tokenizer = tokenizer_for(PHI, eos="<|endoftext|>")
    given = tuple(first) if isinstance(first, list) and first and isinstance(first[0], str) else first
    prompt, talk = talked(tokenizer, environment, "<|end|>", first=given)
    new = talk.prompt(Prompt(0, tuple(prompt), ({"role": "user", "content": "wkquestion"},), {}))
    assert list(new.content) == asked
    assert list(new.token_ids) == tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    json.dumps(talk.prompt_content)
    assert between(tokenizer, talk) == [f"<|end|>\n<|user|>\nwkanswer{i}<|end|>\n<|assistant|>\n" for i in (1, 2)]


def test_an_observation_takes_its_room_from_the_whole_length(environment: Path) -> None:
    tokenizer = tokenizer_for(PHI, eos="<|endoftext|>")
    with pytest.raises(RewardError, match=r"reset returned an observation.* 3023 tokens, no room.*\n.*--max_length"):
        talked(tokenizer, environment, "<|end|>", first="x" * 3000)
    _, talk = talked(tokenizer, environment, "<|end|>", first="x" * 2016)
    assert len(talk.prompt_ids) == 2039 and talk.turns == 1 and not talk.finished
