import time

import pytest

from ares_exp.agents.shell_agent import bash_blocks


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("", []),
        ("no block", []),
        ("```bash\nls\n```", ["ls"]),
        ("text\n```bash\nls\npwd\n```\nmore", ["ls\npwd"]),
        ("```sh\na\n```\n```shell\nb\n```", ["a", "b"]),
        ("```bash  \r\nls\r\n```\r\n", ["ls"]),
        ("```python\nprint()\n```", []),
        ("```bash\nnever closed", []),
        ("```bash\ncat <<'E' > f.md\n```python\nx\nE\n```", ["cat <<'E' > f.md\n```python\nx\nE"]),
        ("```bash\n```", [""]),
        ("inline ```bash\nls\n```", []),
    ],
)
def test_bash_blocks_are_found(reply: str, expected: list[str]) -> None:
    assert bash_blocks(reply) == expected


def test_hostile_reply_costs_linear_time() -> None:
    started = time.process_time()
    assert bash_blocks("```bash\n" * 100_000) == []
    assert time.process_time() - started < 2
