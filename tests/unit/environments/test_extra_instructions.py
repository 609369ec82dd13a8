from pathlib import Path

import pytest

from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.errors import ConfigError
from ares_exp.tasks.task_files import changed_files, content_of
from ares_exp.tasks.task_set import SAMPLES


def test_files_precede_texts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"File {name}.\n")
    plain = HarborEnvironments(tasks="write-greeting")
    told = HarborEnvironments(
        tasks="write-greeting", extra_instruction_paths=[tmp_path / "b", tmp_path / "a"], extra_instructions=["Text."]
    )
    for source in (plain, told):
        source.load(pytest.fail)
    instruction = (SAMPLES / "write-greeting" / "instruction.md").read_text()
    assert plain.tasks[0].stages[0].instruction == instruction
    assert told.tasks[0].stages[0].instruction == f"{instruction}\n\nFile b.\n\n\nFile a.\n\n\nText."


@pytest.mark.parametrize(("name", "told"), [("none", "none"), ("binary", "binary"), ("null\0", "null byte")])
def test_unreadable_file_is_refused(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    source = HarborEnvironments(extra_instruction_paths=[tmp_path / name])
    with pytest.raises(ConfigError, match=rf"`env\.extra_instruction_paths` to be UTF-8 files, but .*{told}"):
        source.load(pytest.fail)


def test_changed_file_changes_the_task_record(tmp_path: Path) -> None:
    def recorded(**options: object) -> str:
        source = HarborEnvironments(tasks="write-greeting", **options)  # type: ignore[arg-type]
        source.load(pytest.fail)
        return source.digest("write-greeting")

    hint = tmp_path / "hint.md"
    hint.write_text("one")
    before = recorded(extra_instruction_paths=[hint])
    assert before == recorded(extra_instruction_paths=[hint])
    hint.write_text("two")
    assert changed_files(before, recorded(extra_instruction_paths=[hint])) == [str(hint)]
    assert content_of(before) == recorded() == content_of(recorded())
