from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.tasks.swebench.patch_files import files_of_patch
from tests.swebench_rows import git


def test_files_of_a_patch_that_git_made(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    long = "".join(f"line {number}\n" for number in range(30))
    before = {"changed.py": "a\n-- a/x\n", "removed.py": "b\n", "old name.py": long, "same.py": "s\n"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "--quiet", "-m", "1")
    (tmp_path / "changed.py").write_text("a\n++ b/y\nno end of line")  # its lines look like headers in the patch
    (tmp_path / "removed.py").unlink()
    (tmp_path / "old name.py").rename(tmp_path / "new name.py")
    (tmp_path / 'ä \t".py').write_text("new\n")
    git(tmp_path, "add", "-A")
    found = files_of_patch(git(tmp_path, "diff", "--cached", "-M"))
    assert set(found.before) == {"changed.py", "removed.py", "old name.py"}
    assert set(found.after) == {"changed.py", "new name.py", 'ä \t".py'}
    assert set(found.all) == {*found.before, *found.after}


def test_no_patch_touches_nothing() -> None:
    assert files_of_patch("").all == ()
    assert files_of_patch("no patch\n").all == ()


@pytest.mark.parametrize("path", ["/etc/passwd", "b/../../x", "b/.git/config", "b/", '"b/\\001\\377.py"', '"b/a\\nb"'])
def test_paths_that_lead_out_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="expected paths"):
        files_of_patch(f"--- /dev/null\n+++ {path}\n@@ -0,0 +1 @@\n+x\n")
