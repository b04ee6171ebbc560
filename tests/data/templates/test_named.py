"""Chat templates by name: the texts of the templates that TRL ships, hand-written renderings, masks, and names;
`--agent_template` and `--add_non_thinking_prefix`.

Covers: megaswift/data/options/agent_templates.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.model_tokenizer import read_tokenizer
from megaswift.data.show.loss_mask import LossMaskCertifier
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.templates.chosen import check_template, read_template
from megaswift.data.templates.named import TOKENIZERS_OWN, named_templates, read_named_template
from megaswift.errors import ConfigError, DataError
from tests.data.chat_template_kinds import TemplateKind, conversations
from tests.data.makers import chat, config, template, tokenizer
from tests.data.templates.test_render import CALL, TOOLS, Q, answer, user

TRL = {
    "qwen2_5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_nothinking": "qwen3_instruct_2507",
    "llama3": "llama3",
    "gemma": "gemma3",
    "phi3": "phi3",
    "deepseek_r1": "deepseek_r1_distill",
    "glm4_5": "glm4moe_training",
}
WITHOUT_TOOLS = ("llama3", "gemma", "phi3", "deepseek_r1", "chatml", "llama", "zephyr", "vicuna")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(text: str, messages: Any, tools: Any = None, prompt: bool = False, **more: Any) -> str | None:
    try:
        made: Any = render_jinja_template(
            [messages], tools=tools, chat_template=text, add_generation_prompt=prompt, **TOKENS, **more
        )
    except TemplateError:
        return None
    return str(made[0][0])


def rows_for(name: str, thinking: str, count: int) -> list[dict[str, Any]]:
    """Conversations that a template can render; DeepSeek-R1's own drops the last reasoning, which is trained here."""
    rows = list(conversations(3, count, TemplateKind(thinking=thinking)))
    plain = [row for row in rows if "tools" not in row] if name in WITHOUT_TOOLS else rows
    return [row for row in plain if name != "deepseek_r1" or "</think>" not in str(row)]


@pytest.mark.wide
@pytest.mark.parametrize("name", TRL)
def test_texts_are_those_of_published_templates(name: str) -> None:
    ours, theirs, compared = read_named_template(name), template(TRL[name]), 0
    assert ours is not None and "generation" in ours
    for thinking in ("kept", "field"):
        for row in rows_for(name, thinking, 40):
            for prompt in (False, True):
                messages = row["messages"][:-1] if prompt else row["messages"]
                for more in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
                    text = rendered(theirs, messages, row.get("tools"), prompt, **more)
                    assert rendered(ours, messages, row.get("tools"), prompt, **more) == text
                    compared += text is not None
    assert compared > 100


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [SYSTEM, user("hi"), answer("yes"), user("so"), answer("no")]
BY_HAND = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    "yes<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n",
    "llama": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nhi [/INST] yes </s><s>[INST] so [/INST] no </s>",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nhi</s>\n<|assistant|>\nyes</s>\n"
    "<|user|>\nso</s>\n<|assistant|>\nno</s>\n",
    "vicuna": "Be brief. USER: hi ASSISTANT: yes</s>USER: so ASSISTANT: no</s>",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_texts_by_hand(name: str) -> None:
    text = read_named_template(name)
    assert text is not None and rendered(text, TALK) == BY_HAND[name]
    before, after = (rendered(text, TALK[:n], prompt=True) for n in (2, 4))
    assert before and after and BY_HAND[name].startswith(before.rstrip()) and BY_HAND[name].startswith(after.rstrip())


def test_every_template_is_compared() -> None:
    assert set(named_templates()) == {*TRL, *BY_HAND}
    assert not TOKENIZERS_OWN & set(named_templates())


@pytest.mark.wide
@pytest.mark.parametrize("name", named_templates())
def test_masks_of_every_template(name: str) -> None:
    """Answers with the token that ends a turn, and nothing else."""
    tok = tokenizer("qwen")
    tok.add_special_tokens({"additional_special_tokens": ["</s>", "<|user|>", "<|eot_id|>", "<|end|>", "<|im_end|>"]})
    tok.add_special_tokens({"additional_special_tokens": ["<end_of_turn>", "<｜end▁of▁sentence｜>", "<|observation|>"]})
    tok.bos_token, tok.eos_token = "<|endoftext|>", "</s>"
    spec = encode_spec(config(Path("/tmp"), "x", chat_template=name).data, tok, "sft")
    for thinking in ("kept", "field"):
        rows = rows_for(name, thinking, 30)
        findings = LossMaskCertifier(spec).certify(("f", LocatedRow(i, row)) for i, row in enumerate(rows))
        faults = {k: n for k, n in findings.faults.items() if k != "reasoning_missing"}  # of templates without it
        assert findings.answers > 10 and not faults, findings
    spans = [RowEncoder(spec).render({"messages": TALK})]
    said = [spans[0].text[a:b] for a, b in spans[0].spans]
    assert [s.replace("yes", "no") for s in said] == [said[1]] * 2 and said[1].lstrip().startswith("no")


def test_names(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert read_template("llama2") == read_template("llama") and read_template("gemma3_text") == read_template("gemma")
    assert read_template("qwen2_5_vl", own="{{ own }}") == "{{ own }}"
    check_template("qwen2_5_vl")
    with pytest.raises(DataError, match="stands for the template of the model's tokenizer, which has none"):
        read_template("qwen2_5_vl")
    for wrong, near in (
        ("qwen3_nothinkin", "did you mean qwen3_nothinking?"),
        ("_hermes_calls", "chatml"),
        ("../x", ""),
    ):
        with pytest.raises(DataError, match="nor the name of one") as error:
            read_template(wrong)
        assert near in str(error.value)
    own = tmp_path / "qwen3"
    own.write_text("{{ mine }}")
    assert read_template(str(own)) == "{{ mine }}"
    tokenizer("qwen").save_pretrained(tmp_path / "m")
    assert read_tokenizer(tmp_path / "m", False, "qwen3").chat_template == read_named_template("qwen3")
    assert "vocabulary" not in capsys.readouterr().err
    read_tokenizer(tmp_path / "m", False, "llama3")
    said = capsys.readouterr().err
    assert "<|start_header_id|>, <|end_header_id|>, <|eot_id|> are not in the vocabulary" in said


def test_aliases_of_the_option() -> None:
    for name in ("template", "template_type", "chat_template"):
        assert config(Path("/tmp"), "x", **{name: "qwen3"}).data.chat_template == "qwen3"


def test_agent_templates() -> None:
    def spec(name: str, own: str) -> None:
        encode_spec(config(Path("/tmp"), "x", agent_template=name).data, tokenizer("qwen", own), "sft")

    for name, own in (
        ("hermes", "qwen3"),
        ("qwen3_coder", "qwen3_5_think"),
        ("glm4_5", "glm4moe"),
        ("llama3", "llama3_1"),
    ):
        spec(name, own)
    with pytest.raises(ConfigError, match="--agent_template hermes: the chat template writes tool calls otherwise: as"):
        spec("hermes", "glm4moe")
    with pytest.raises(ConfigError, match="otherwise: not at all"):
        spec("hermes", "llama3")
    with pytest.raises(ConfigError, match="react_en"):
        spec("react_de", "qwen3")


@pytest.mark.parametrize("own", ["tokenizer", "named"])
@pytest.mark.parametrize("turns", ["default", "last_round", "all"])
def test_no_empty_reasoning(own: str, turns: str) -> None:
    """Without the block that Qwen3's template writes; reasoning and blocks of rows stay."""
    options = {"add_non_thinking_prefix": False, "loss_scale": turns} | (
        {"chat_template": "qwen3"} if own == "named" else {}
    )
    spec = encode_spec(config(Path("/tmp"), "x", **options).data, tokenizer("qwen", "qwen3"), "sft")
    talk = chat("a", "b")["messages"] + chat("c", "d")["messages"]
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    text += "<|im_start|>assistant\nd<|im_end|>\n"
    encoder = RowEncoder(spec)
    got = encoder.render({"messages": talk})
    said = ["b<|im_end|>", "d<|im_end|>"][turns == "last_round" :]
    assert got.text == text
    assert [got.text[a:b] for a, b in got.spans] == ([text] if turns == "all" else said) or turns == "all"
    assert sum(b - a for a, b in got.spans) == (len(text) if turns == "all" else sum(map(len, said)))
    tokens, mask = next(encoder.tokenize([got]))
    assert tokens.tolist() == tokenizer("qwen")(text, add_special_tokens=False)["input_ids"]
    assert bool(mask.all()) == (turns == "all")
    assert not LossMaskCertifier(spec).certify([("f", LocatedRow(1, {"messages": talk}))]).faults
    thinking = encoder.render({"messages": [Q, answer("<think>\nwell\n</think>\n\nyes")]}).text
    assert "<think>\nwell\n</think>\n\nyes" in thinking
    assert "assistant\n<tool_call>" in encoder.render({"messages": [Q, CALL], "tools": TOOLS}).text
