"""Secrets in every spelling, and ordinary lines that look like them. Covers: redaction."""

from __future__ import annotations

import time

import pytest

from megaswift.base.redaction import has_secret, is_secret, redact_problems, redacted, redacted_command, secret_lines
from megaswift.config.sections import OPTIONS
from megaswift.errors import Problem

SECRETS = (
    "huggingface-cli login --token SECRETCANARY123456",
    "hf auth login --token=SECRETCANARY123456",
    "hf login -t SECRETCANARY123456",
    "docker login -u me -p hunter2 reg",
    "wandb login SECRETCANARY123456abcdef",
    'curl -H "Authorization: Bearer SECRETCANARY123456" http://x',
    "curl -H 'Authorization: Basic dXNlcjpwYXNz' x",
    "https://h/d.jsonl?token=hf_SECRETCANARY123456",
    "https://h/?access_token=SECRETCANARY123456",
    "https://h/?a=1&api_key=SECRETCANARY123456",
    "https://a.blob/x?sv=1&sig=abc%3D",
    "https://b.s3/x?X-Amz-Signature=abc",
    "export HF_TOKEN=SECRETCANARY123456",
    "HF_TOKEN='hf_x' a",
    "API_KEY=sk-1 tool",
    "TOKEN=abc tool",
    "password=hunter2",
    'password = "hunter2"',
    "PASSWORD: hunter2",
    "api_key: SECRETCANARY123456",
    '{"api_key": "SECRETCANARY123456"}',
    "-H 'X-Api-Key: SECRETCANARY123456'",
    "--header 'PRIVATE-TOKEN: abc'",
    "machine h login me password hunter2",
    "machine h\n  login me\n  password hunter2",
    "git clone https://me:pw@h/x",
    "https://tok@h/x",
    "echo hf_abcdefghijklmnopqrstuvwxyz0123456789",
    "x sk-proj-abcdefghij1234567890",
    "ghp_abcdefghijklmnopqrst0123",
    "AKIAIOSFODNN7EXAMPLE",
    "curl -u me:hunter2 http://x",
    "curl --user me:hunter2 x",
    "sshpass -p hunter2 ssh x",
    "aws configure set aws_secret_access_key abcdef",
    "--aws-secret-access-key abc",
    "Bearer abcdefgh12345678",
    "//registry/:_authToken=abcd",
    "AccountKey=abc;x",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    "mlflow --password=abc",
    "key: 9f8a7b6c5d4e3f2a1b",
    "--key 9f8a7b6c5d4e3f2a1b",
    "clientSecret: abc",
    "hub_token: abc",
    "wandb login --relogin 0123456789abcdef0123456789abcdef01234567",
    "swanlab login -k abcd",
    "echo 'machine x login y password z' > ~/.netrc",
    "--hf-token abc",
    "--hub_token abc",
    "echo hunter2supersecret | docker login -u me --password-stdin",
    "printf %s hunter2 | gh auth login --with-token",
    "redis-cli -a hunter2 ping",
    "setenv HF_TOKEN hunter2",
    'os.environ["WANDB_API_KEY"] = "SECRETCANARY123456"',
    "https://hooks.slack.com/services/T00000000/B00000000/SECRETCANARY123456",
    "https://discord.com/api/webhooks/123456789012345678/SECRETCANARY123456",
    "export MY_PWD=hunter2",
    "Cookie: sessionid=SECRETCANARY123456",
)
ORDINARY = (
    "--tokenizer x",
    "max_tokens: 512",
    "token_type_ids: [1]",
    "--max_new_tokens 5",
    "--eos_token '<eos>'",
    "pad_token: <pad>",
    "export HF_TOKEN=$(cat /mnt/data/HF_TOKEN)",
    'export HF_TOKEN="$(< /mnt/x)"',
    "HF_TOKEN=`cat t`; export HF_TOKEN",
    "export HF_TOKEN=",
    "export SSH_KEY=~/.ssh/id SSH_KEY=/k",
    "export HF_HOME=hf PAD_TOKEN=x $HF_TOKEN=x",
    "huggingface-cli login --token $HF_TOKEN",
    'curl -H "Authorization: Bearer $HF_TOKEN" x',
    "https://h/x?token=$T",
    "sort --key 2",
    "tolerations: [{key: nvidia.com/gpu, operator: Exists}]",
    "secretKeyRef: {name: hub, key: token}",
    "--columns key=question",
    "docker login --password-stdin reg.io",
    "ssh -t host",
    "docker run -t image",
    "tail -p 5",
    "git+ssh://git@host/a",
    "https://host/a@b",
    "http://h:80/x",
    "the password: ask your admin for it",
    "--stop_words </answer>",
    "tokens: 5",
    "key: value",
    "# name: value per line, key: value",
    "login node",
    "ssh login-node -p 22",
    "module load sk-learn",
    "pip install hf_transfer hf_hub_download_with_progress",
    "--model /data/token",
    "keys: [a, b]",
    "--token /run/secrets/token",
    "export AWS_SHARED_CREDENTIALS_FILE=/x",
    "GOOGLE_APPLICATION_CREDENTIALS=/x.json",
    "use_auth_token: true",
    "--push_to_hub_token",
    "token=",
    "attention_mask=x",
    "monkey=5",
    "turkey: 8",
    "--hidden_size 8",
    "learning_rate: 1.0e-5",
    "system: 'Write the key: then answer'",
    "tokenizer: a",
    "special_tokens: [a]",
    "# gpus: 8; tokens a step: 4,194,304 tokens",
    "reward_token_level: x",
    "passes: 2",
    "two_pass: 3",
    "cat ~/.netrc",
    "kubectl create secret generic hub --from-literal=token=...",
    "secrets: {HF_TOKEN: hub/token}",
    "secret_variables: [HF_TOKEN]",
    "image_pull_secrets: [registry]",
    "- token: 5",
    "data: key",
    "https://hub.example/data?revision=main&page=2",
    "--metric_for_best_model token_accuracy",
    '--rope_scaling \'{"key": "value"}\'',
    "srun --export=ALL,PATH bash -c x",
    "primary_key: id",
    "foreign_key: user_id",
    "OPENAI_API_KEY=EMPTY",
    "api_key: EMPTY",
    "login node is cluster-login-node-00001",
    "echo $HF_TOKEN | docker login --password-stdin",
    "echo done | tee log",
    "export PWD=/x OLDPWD=/y",
    "setenv HF_HOME hf",
)
NAMES = ("X-Api-Key", "apiKey", "aws_session_token", "DB_PASS", "spark.secret.key", "PRIVATE-TOKEN")
OTHER_NAMES = ("password-stdin", "token_file", "tokenizer", "max_tokens", "PWD", "monkey")
PIECES = (
    "a",
    "a-",
    "login ",
    "curl ",
    "--a ",
    "'",
    "a:",
    "?a=b",
    "login x password ",
    "hf_a",
    "sk-",
    "eyJ",
    "curl -u a",
    "redis-cli ",
    "redis-cli -a",
    "echo a|",
    "login --a ",
    "login a ",
    "setenv -a ",
)


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_recognized_and_masked(text: str) -> None:
    assert has_secret(text)
    assert "***" in redacted(text) and not has_secret(redacted(text))


@pytest.mark.parametrize("text", ORDINARY)
def test_an_ordinary_line_is_not(text: str) -> None:
    assert not has_secret(text) and redacted(text) == text


@pytest.mark.parametrize("part", ["SECRETCANARY123456", "hunter2", "dXNlcjpwYXNz"])
def test_no_part_of_a_value_stays(part: str) -> None:
    assert not any(part in redacted(text) for text in SECRETS)


def test_lines_are_named() -> None:
    assert secret_lines("a: 1\nhub_token: x1\nmachine h\nlogin me\npassword p1\n") == [2, 5]


def test_options_that_are_secret() -> None:
    assert {name for name in OPTIONS if is_secret(name)} == {"hub_token", "swanlab_token"}
    assert all(map(is_secret, NAMES)) and not any(map(is_secret, OTHER_NAMES))


def test_a_message_shows_no_secret_of_a_url() -> None:
    problem = Problem(
        "--dataset https://h/d.jsonl?token=abcdefgh", "GET https://me:hunter2@h/ failed: hunter3", "try x"
    )
    (shown,) = redact_problems([problem], ["hunter3"])
    assert "abcdefgh" not in str(shown) and "hunter" not in str(shown)
    assert redacted_command("x --hub-token a b --lr 1 --header 'Authorization: Bearer abc'").count("***") == 2


@pytest.mark.wide
@pytest.mark.parametrize("piece", PIECES)
def test_long_lines_take_no_longer_than_their_length(piece: str) -> None:
    began = time.process_time()
    has_secret(piece * (300_000 // len(piece)))
    assert time.process_time() - began < 3
