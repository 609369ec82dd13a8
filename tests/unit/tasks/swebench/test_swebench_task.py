"""The scripts that run in a container's repository, in a local box."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ContainerStartError
from ares_exp.tasks.swebench.swebench_task import agent_patch, apply_patch, set_up_repository
from tests.swebench_rows import BUGGY, git

pytestmark = [pytest.mark.local, pytest.mark.once]

Repository = tuple[Path, str]
WHO = "git config user.name t && git config user.email t@example.org"


@pytest.fixture
async def box(repository: Repository) -> AsyncIterator[Container]:
    """A box with the whole repository in /testbed, checked out at the base commit: a careless image."""
    async with LocalContainerFactory()(ContainerSpec("repository")) as container:
        await container.upload(repository[0], "/testbed")
        assert (
            await run(container, f"git reset -q --hard {repository[1]} && git remote add origin file:///no/where") == ""
        )
        yield container


async def run(box: Container, command: str) -> str:
    result = await box.exec(command, cwd="/testbed", user="root", timeout_sec=60, shell="bash -c")
    assert result.exit_code == 0, result.output
    return result.output


async def test_later_commits_are_unreachable(box: Container, repository: Repository) -> None:
    path, base = repository
    fix = git(path, "rev-parse", "main").strip()
    assert fix in await run(box, "git log --all --format=%H && git reflog --format=%H && git tag")
    await run(box, f"{WHO} && git branch old HEAD~1 && git tag -m old v1 HEAD~1")
    await run(box, "git repack -adq && cd .git/objects/pack && for p in *.pack; do touch ${p%.pack}.keep; done")
    await set_up_repository(box, base)
    assert (await box.exec(f"git -C /testbed cat-file -e {fix}", timeout_sec=60)).exit_code != 0
    assert await run(box, "git remote && git reflog && git fsck --full --unreachable --no-progress") == ""
    assert (await run(box, "git log --all --format=%s")).split("\n") == ["before", "before", ""]
    assert sorted((await run(box, "git branch --format='%(refname:short)' && git tag")).split()) == [
        "main",
        "old",
        "v1",
    ]
    assert await run(box, "git status --porcelain") == ""
    assert await run(box, "cat calc.py") == BUGGY


async def test_uncommitted_files_of_the_image_are_preserved(box: Container, repository: Repository) -> None:
    await run(box, f"{WHO} && echo 1 > setup.cfg && git add -A && git commit -qm SWE-bench && echo new > built.txt")
    await set_up_repository(box, repository[1])
    assert await run(box, "git log -1 --format=%s && cat built.txt") == "SWE-bench\nnew\n"
    assert (await agent_patch(box, repository[1])).data == b""


@pytest.mark.parametrize("broken", ["rm -rf .git", "git checkout -q --orphan x && git commit -qm x"])
async def test_unrelated_image_is_refused(box: Container, repository: Repository, broken: str) -> None:
    await run(box, f"{WHO} && {broken}")
    with pytest.raises(ContainerStartError, match=repository[1]):
        await set_up_repository(box, repository[1])


async def test_patch_contains_all_changes_of_the_agent(box: Container, repository: Repository) -> None:
    base = repository[1]
    await set_up_repository(box, base)
    await run(
        box,
        f"{WHO} && printf 'ignored\\n' > .gitignore && touch ignored && git mv README.md 'read me' && git add -A && "
        "git commit -qm mine && git update-index --skip-worktree calc.py && echo '# \\xe4' >> calc.py && "
        "printf '\\0\\1' > binary && chmod +x tests/test_calc.py && touch .git/index.lock && "
        "git config diff.noprefix true && git config diff.external false",
    )
    patch = await agent_patch(box, base)
    assert patch.problem is None
    assert b"ignored" not in patch.data.replace(b"+ignored", b"").replace(b".gitignore", b"")
    files = await run(
        box, "find . -path ./.git -prune -o -type f ! -name ignored -print | sort | xargs -d '\\n' ls -l | cut -c1-10"
    )
    content = await run(
        box, "find . -path ./.git -prune -o -type f ! -name ignored -print | sort | xargs -d '\\n' md5sum"
    )
    async with LocalContainerFactory()(ContainerSpec("fresh")) as fresh:
        await fresh.upload(repository[0], "/testbed")
        await run(fresh, f"git reset -q --hard {base}")
        await fresh.exec("cat > /p.patch < /dev/null", timeout_sec=60)
        path = Path(str(repository[0]) + ".patch")
        path.write_bytes(patch.data)
        await fresh.upload(path, "/p.patch")
        assert (await apply_patch(fresh, "/p.patch")).exit_code == 0
        listing = "find . -path ./.git -prune -o -type f -print | sort | xargs -d '\\n'"
        assert await run(fresh, f"{listing} md5sum") == content
        assert await run(fresh, f"{listing} ls -l | cut -c1-10") == files


async def test_removed_repository_gives_an_empty_patch(box: Container, repository: Repository) -> None:
    await set_up_repository(box, repository[1])
    await run(box, "rm -rf .git")
    patch = await agent_patch(box, repository[1])
    assert patch.data == b""
    assert "there is no git repository any more" in str(patch.problem)


EVIL = "touch /started; cat"
SETTINGS = (
    "true",
    f"git config core.fsmonitor '{EVIL}' && git config core.pager '{EVIL}' && git config core.hooksPath /hooks",
    f"mkdir /hooks && printf '#!/bin/sh\n{EVIL}\n' > /hooks/post-index-change && chmod +x /hooks/*",
    f"for one in external evil.textconv evil.command; do git config diff.$one '{EVIL}'; done",
    f"git config filter.evil.clean '{EVIL}; echo more' && git config filter.evil.required true",
    "printf '* filter=evil diff=evil\\n' > .git/info/attributes && git config core.attributesFile .git/info/attributes",
    "git config core.worktree /srv",
    "git config core.bare true",
    "rm -f .git/HEAD .git/index",
    "echo '[[[' > .git/config",
    "echo '[[[' > /root/.gitconfig",
)


async def test_git_settings_of_the_agent_are_ignored(box: Container, repository: Repository) -> None:
    await set_up_repository(box, repository[1])
    await run(box, "sed -i 's/a - b/a + b/' calc.py && git init -q inside && echo 1 > inside/file && echo new > new")
    plain = await agent_patch(box, repository[1])
    assert plain.data.count(b"diff --git") == 2
    for setting in SETTINGS:  # one on top of the other
        await run(box, setting)
        assert await agent_patch(box, repository[1]) == plain, setting
    await run(box, "! test -e /started")


async def test_patch_without_start_ref_uses_base_commit(box: Container, repository: Repository) -> None:
    await set_up_repository(box, repository[1])
    await run(box, "git update-ref -d refs/ares_exp/start && echo >> calc.py")
    assert b"calc.py" in (await agent_patch(box, repository[1])).data
