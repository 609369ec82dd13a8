"""`env.repo`: its spellings."""

from __future__ import annotations

import pytest

from ares_exp.tasks.task_sources.repository_reference import RepositoryReference

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "url", "ref", "folder"),
    [
        ("org/name", "https://github.com/org/name.git", None, None),
        ("org/name.git@v1", "https://github.com/org/name.git", "v1", None),
        (f"org/name@{COMMIT}", "https://github.com/org/name.git", COMMIT, None),
        ("gitlab.com/org/name", "https://gitlab.com/org/name", None, None),
        ("https://host/org/name", "https://host/org/name", None, None),
        ("https://host:8443/org/sub/name.git@main", "https://host:8443/org/sub/name.git", "main", None),
        ("https://host/org/name/tree/main", "https://host/org/name", "main", None),
        ("https://host/org/name/tree/v2/a/b/", "https://host/org/name", "v2", "a/b"),
        ("https://huggingface.co/datasets/org/name", "https://huggingface.co/datasets/org/name", None, None),
        ("ssh://git@host/org/name@main", "ssh://git@host/org/name", "main", None),
        ("git@host:org/name.git", "git@host:org/name.git", None, None),
        ("git@host:org/name@v1", "git@host:org/name", "v1", None),
        ("file:///srv/tree/tasks.git@main", "file:///srv/tree/tasks.git", "main", None),
    ],
)
def test_what_is_meant(text: str, url: str, ref: str | None, folder: str | None) -> None:
    assert RepositoryReference.parse(text) == RepositoryReference(url, ref, folder)


@pytest.mark.parametrize("text", ["", ".", "./tasks", "../tasks", "/srv/tasks", "~/tasks", "name", "a/b/c", "-x/y"])
def test_local_paths_and_other_text_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a repository"):
        RepositoryReference.parse(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("https://host/org/name/tree/main@v1", "got both 'v1' and 'main'"),
        ("https://host/", "expected a repository"),
        ("https://host/tree/main", "expected a repository"),
        ("https://host/org/name/tree/main/../../x", "stays inside"),
        ("https://me:secret@host/org/name", "without user and password"),
        ("ext::sh", "address of a git repository"),
        ("ftp://host/org/name", "one of the protocols"),
        ("org/name@-x", "a commit, a branch or a tag"),
    ],
)
def test_what_git_must_not_be_given_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        RepositoryReference.parse(text)
