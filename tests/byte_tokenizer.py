"""A tokenizer in place of transformers' `AutoTokenizer`: each byte is a token, and 256 ends a message."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

END = 256


class ByteTokenizer:
    chat_template, eos_token_id = "bytes", END

    def __init__(self) -> None:
        self.added_tokens_decoder: dict[int, Any] = {}

    def apply_chat_template(self, messages: Sequence[Any], *, add_generation_prompt: bool, **_: Any) -> str:
        said = "".join(f"<{one['role']}>{one['content']}\x00" for one in messages)
        return f"{said}<assistant>" if add_generation_prompt else said

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [byte or END for byte in text.encode()]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return bytes(one % END for one in ids).decode(errors="replace")


def use_byte_tokenizer(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces transformers. Returns the names of the tokenizers that are loaded from now on."""
    loaded: list[str] = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str, **_: Any) -> ByteTokenizer:
            loaded.append(name)
            return ByteTokenizer()

    made = ModuleType("transformers")
    made.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", made)
    return loaded
