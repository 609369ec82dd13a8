import time

import pytest

from ares_exp.agents.conversing_agent import MAX_SKILLS, Skill, as_plain_chat, find_skills, read_skill
from ares_exp.agents.shell_agent import bash_blocks
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory

# A SKILL.md; its name and description.
HEADS = [
    ("---\nname: pdf\ndescription: Reads PDFs.\n---\n# PDF\ndescription: no\n", "pdf", "Reads PDFs."),
    ("---\r\nname: 'pdf'\r\ndescription: \"Reads: PDFs\"\r\n---\r\n", "pdf", "Reads: PDFs"),
    ("---\ndescription: >-\n  Reads\n  PDFs.\nlicense: MIT\n  name: no\n---\n", "folder", "Reads PDFs."),
    ("---\nname: pdf\ndescription: Reads\n  and writes.\n", "pdf", "Reads and writes."),
    ("# No front matter\nname: no\n", "folder", ""),
    ("", "folder", ""),
    ("---\nname: a\n---\n", "a", ""),
    (f"---\ndescription: {'x' * 5000}\n---\n", "folder", "x" * 1024),
]


@pytest.mark.parametrize(("text", "name", "description"), HEADS)
def test_skill_metadata_is_read(text: str, name: str, description: str) -> None:
    path = "/skills/folder/SKILL.md"
    assert read_skill(text, path) == Skill(name, description, path)


@pytest.mark.local
async def test_skills_of_a_container_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    async with LocalContainerFactory()(ContainerSpec("skills")) as box:
        assert await find_skills(box, "/my skills", timeout_sec=20) == []
        assert "no subfolder of /my skills in its container has a SKILL.md" in caplog.text
        await box.exec(
            "mkdir -p '/my skills' && cd '/my skills' && mkdir b a .hidden empty && touch README.md && "
            "printf -- '---\\ndescription: A\\0B\\n---\\n' > a/SKILL.md && touch .hidden/SKILL.md && "
            "printf -- '---\\nname: The B\\n' > b/SKILL.md && head -c 100000 /dev/zero | tr '\\0' x >> b/SKILL.md"
        )
        assert await find_skills(box, "/my skills", timeout_sec=20) == [
            Skill("a", "AB", "/my skills/a/SKILL.md"),
            Skill("The B", "", "/my skills/b/SKILL.md"),
        ]
        await box.exec(f"cd '/my skills' && for i in $(seq {MAX_SKILLS}); do mkdir c$i; touch c$i/SKILL.md; done")
        assert len(await find_skills(box, "/my skills", timeout_sec=20)) == MAX_SKILLS


def test_tool_calls_become_text() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "sh", "arguments": '{"cmd": "ls"}'}}
    written = '<tool_call>{"name": "sh", "arguments": "{\\"cmd\\": \\"ls\\"}"}</tool_call>'
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    assert as_plain_chat(
        [
            {"role": "user", "content": [image]},
            {"role": "assistant", "content": "Look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "a b"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "content": "Done."},
        ]
    ) == [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": f"Look.\n{written}"},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": f"{written}\n{written}"},
        {"role": "user", "content": "Be brief."},
        {"role": "assistant", "content": "Done."},
    ]


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
