"""What is handed to git, and what is refused."""

import pytest

from ares_exp.tasks.task_sources import git_tasks

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("ext::sh -c touch% /tmp/x", "address of a git repository"),
        ("ext::sh", "address of a git repository"),
        ("fd::17", "address of a git repository"),
        ("ext://sh", "one of the protocols"),
        ("ftp://host/name", "one of the protocols"),
        ("--upload-pack=touch x", "address of a git repository"),
        ("-oProxyCommand=x:y", "address of a git repository"),
        ("ssh://-oProxyCommand=x/name", "with a host"),
        ("ssh://-l@host/name", "with a host"),
        ("https:///name", "with a host"),
        ("https://[::1/name", "address of a git repository"),
        ("/srv/tasks", "file:///"),
        ("../tasks", "file:///"),
        ("org/name", "file:///"),
        ("", "file:///"),
        ("https://host/a\nb", "address of a git repository"),
        ("https://host/" + "a" * 1000, "address of a git repository"),
    ],
)
def test_unsafe_addresses_are_refused(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        git_tasks.check_git_url(url)


@pytest.mark.parametrize(
    "url", ["https://me:hush-hush@host/n", "https://hush-hush@host/n", "ssh://git:hush-hush@host/n"]
)
def test_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="without a user name or password") as caught:
        git_tasks.check_git_url(url)
    assert "hush-hush" not in str(caught.value)


def test_commit_is_lowercased() -> None:
    assert git_tasks.check_git_ref("A" * 40) == "a" * 40


@pytest.mark.parametrize(
    "ref", ["", "-x", "--upload-pack=x", "+main", "a:b", "a..b", "a b", "a\nb", "a@{1}", "a^", "a~1", "x.lock", "a//b"]
)
def test_unsafe_refs_are_refused(ref: str) -> None:
    with pytest.raises(ValueError, match="a commit, a branch or a tag"):
        git_tasks.check_git_ref(ref)


@pytest.mark.parametrize(
    ("path", "expected"), [("a/b", "a/b"), ("a/./b/", "a/b"), ("a/../b", "b"), ("", "."), (".", "."), ("a/..", ".")]
)
def test_inner_paths_are_normalised(path: str, expected: str) -> None:
    assert git_tasks.check_inner_path(path) == expected


@pytest.mark.parametrize("path", ["/a", "..", "../a", "a/../../b", "a\nb", "a\0b", "a\\b", "a/" * 600])
def test_paths_outside_the_repository_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="stays inside the repository"):
        git_tasks.check_inner_path(path)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://host/org/name.git", "name"),
        ("git@host:org/name/", "name"),
        ("host:name", "name"),
        ("file:///..", "repository"),
    ],
)
def test_task_name_comes_from_the_repository(url: str, name: str) -> None:
    assert git_tasks.GitTask(url, None, ".").name == name


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
def test_reference_is_parsed(text: str, url: str, ref: str | None, folder: str | None) -> None:
    assert git_tasks.RepositoryReference.parse(text) == git_tasks.RepositoryReference(url, ref, folder)


@pytest.mark.parametrize("text", ["", ".", "./tasks", "../tasks", "/srv/tasks", "~/tasks", "name", "a/b/c", "-x/y"])
def test_local_paths_and_other_text_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a repository"):
        git_tasks.RepositoryReference.parse(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("https://host/org/name/tree/main@v1", "got 'v1' and 'main'"),
        ("https://host/", "expected a repository"),
        ("https://host/tree/main", "expected a repository"),
        ("https://host/org/name/tree/main/../../x", "stays inside"),
        ("ftp://host/org/name", "one of the protocols"),
        ("org/name@-x", "a commit, a branch or a tag"),
    ],
)
def test_unsafe_references_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        git_tasks.RepositoryReference.parse(text)
