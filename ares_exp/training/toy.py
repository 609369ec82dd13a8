"""A tiny model and a task that train within minutes on a CPU; a word of the model is a whole reply.

`python -m ares_exp.training.toy FOLDER` writes

- `FOLDER/model`: two layers with random weights and a vocabulary of some thirty words. Each of the last ones is a whole
  call of the tool `bash`, so that one token is one reply: `policy.max_output_tokens=1`;
- `FOLDER/tasks/two-words`: a task of two turns. Its reward is 0.5 when the first line of a file is right and 1 when the
  second is, too.

The sample task `write-greeting` is solved by one of the words.
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
"""What the words that are replies run."""

WORDS = ("user", "assistant", "tool", "Create", "the", "file", "It", "must", "hold", "line", "returncode", "output")
"""Words that the model can read; all others are the same to it."""

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
# Reward 1 for both lines, 0.5 for the first alone, or with another behind it, else 0.

reward=0
[ "$(head -n 1 /app/words 2>/dev/null)" != alpha ] || reward=0.5
[ "$(cat /app/words 2>/dev/null)" != $'alpha\\nbeta' ] || reward=1
echo "$reward" > /logs/verifier/reward.txt
""",
}


def call_of(command: str) -> str:
    """Writes the call of `bash` with a command, as a model of the Hermes family does."""
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def toy_tokenizer(replies: Sequence[str]) -> Any:
    """Makes a tokenizer with a token for each reply, and for each of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AddedToken, PreTrainedTokenizerFast

    special = ("<unk>", "<pad>", "<|im_end|>", "<|im_start|>")
    vocabulary = {word: number for number, word in enumerate((*special, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    made.add_tokens([AddedToken(reply, normalized=False, special=False) for reply in replies])
    made.chat_template = CHAT_TEMPLATE
    return made


def toy_model(tokenizer: Any, *, seed: int = 0, num_layers: int = 2, width: int = 32) -> Any:
    """Makes a model with random weights, which says each of its words about as often."""
    import torch
    from transformers import Olmo2Config, Olmo2ForCausalLM  # of a family whose tokenizers are loaded as they are

    config = Olmo2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
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
    """Writes a model that has a word for each of these replies; returns its folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = toy_tokenizer(replies)
    toy_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_task(folder: Path) -> Path:
    """Writes the task of two turns; returns its folder."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return folder


def main(arguments: Sequence[str]) -> int:
    """Writes the toys to the folder that the command line names; returns the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m ares_exp.training.toy FOLDER\n")
        return 2
    folder = Path(arguments[0])
    replies = [call_of(command) for command in COMMANDS]
    for made in (write_model(folder / "model", replies), write_task(folder / "tasks" / "two-words")):
        sys.stdout.write(f"{made}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
