"""A tiny model and a task, to try training on a CPU within minutes. Each reply of the model is a single token.

`python -m ares_exp.training.toy FOLDER [SEED]` writes:

- `FOLDER/model`: a model with two layers, random weights and about thirty tokens. Some tokens each represent a
  complete call of the tool `bash`, so that one token is one reply (`policy.max_output_tokens=1`).
- `FOLDER/tasks/two-words`: a task of two turns. Its reward is 0.5 if the first line of a file is correct, and 1 if both
  lines are correct.

The model can also solve the sample task `write-greeting`, with a single token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMANDS = (
    "echo 'Hello, harbor!' > /app/greeting.txt",
    "echo 'Hello!' > /app/greeting.txt",
    "ls /app",
    "echo alpha >> /app/words",
    "echo beta >> /app/words",
    "echo gamma >> /app/words",
)
"""Shell commands. For each command, the vocabulary has one token: a complete reply that calls `bash` with it."""

WORDS = ("user", "assistant", "tool", "Create", "the", "file", "It", "must", "hold", "line", "returncode", "output")
"""Words that are tokens of the vocabulary. The tokenizer drops all other words of a prompt."""

CHAT_TEMPLATE = """\
{%- for message in messages if message.role != 'system' -%}
<|im_start|> {{ message.role }} {{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|> assistant{% endif -%}"""

_FILES: Mapping[str, str] = {
    "instruction.md": "Create the file `/app/words`. It must hold two lines: `alpha`, then `beta`.\n",
    "task.toml": """\
schema_version = "1.4"

[task]
name = "ares-exp/two-words"
description = "Write two lines, one after the other."

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 60.0
network_mode = "no-network"
""",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "solution/solve.sh": "#!/usr/bin/env bash\nprintf 'alpha\\nbeta\\n' > /app/words\n",
    "tests/test.sh": """\
#!/usr/bin/env bash
# The reward is 1 if both lines are correct, 0.5 if only the first line is correct, otherwise 0.

reward=0
[ "$(head -n 1 /app/words 2>/dev/null)" != alpha ] || reward=0.5
[ "$(cat /app/words 2>/dev/null)" != $'alpha\\nbeta' ] || reward=1
echo "$reward" > /logs/verifier/reward.txt
""",
}


def call_of(command: str) -> str:
    """Returns the text of a call of the tool `bash`, in the format of the Hermes models."""
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def toy_tokenizer(replies: Sequence[str]) -> Any:
    """Creates a tokenizer with one token for each reply and for each word in `WORDS`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import AddedToken, PreTrainedTokenizerFast

    special = ("<unk>", "<pad>", "<|im_end|>", "<|im_start|>")
    vocabulary = {word: number for number, word in enumerate((*special, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    known = Regex(rf"\b({'|'.join(WORDS)})\b")
    words.pre_tokenizer = pre_tokenizers.Split(known, behavior="removed", invert=True)
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    made.add_tokens([AddedToken(reply, normalized=False, special=False) for reply in replies])
    made.chat_template = CHAT_TEMPLATE
    return made


def toy_model(tokenizer: Any, *, seed: int = 0) -> Any:
    """Creates a model with random weights, for which all tokens have similar probabilities."""
    import torch
    from transformers import Olmo2Config, Olmo2ForCausalLM  # transformers loads tokenizers of this family unchanged

    config = Olmo2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Olmo2ForCausalLM(config)


def write_model(folder: Path, replies: Sequence[str], *, seed: int = 0) -> Path:
    """Writes a model whose tokenizer has one token for each of `replies`. Returns the folder of the model."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = toy_tokenizer(replies)
    toy_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_task(folder: Path) -> Path:
    """Writes the task of two turns. Returns the folder of the task."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return folder


def main(arguments: Sequence[str]) -> int:
    """Writes the model and the task to the folder on the command line. Returns the exit code."""
    seeds = [int(one) for one in arguments[1:] if one.isdecimal()]
    if not 1 <= len(arguments) == 1 + len(seeds) <= 2 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m ares_exp.training.toy FOLDER [SEED]\n")
        return 2
    folder, seed = Path(arguments[0]), seeds[0] if seeds else 0
    replies = [call_of(command) for command in COMMANDS]
    for made in (write_model(folder / "model", replies, seed=seed), write_task(folder / "tasks" / "two-words")):
        sys.stdout.write(f"{made}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
