import pytest

from ares_exp.tasks.task_toml import Artifact
from ares_exp.tasks.verification.collection import ManifestEntry, Places, is_conventional, place_of, with_conventional


def artifact(source: str, destination: str = "", **more: object) -> Artifact:
    return Artifact.model_validate({"source": source, "destination": destination, **more})


@pytest.mark.parametrize(
    ("source", "destination", "place"),
    [
        ("/app/out.txt", "", "app/out.txt"),
        ("/app/out/", "", "app/out"),
        ("//app//out", "", "app/out"),
        ("relative/x", "", "relative/x"),
        ("/app/out.txt", "kept/report.txt", "kept/report.txt"),
        ("/", "", "."),
    ],
)
def test_artifact_paths_are_normalised(source: str, destination: str, place: str) -> None:
    assert str(place_of(artifact(source, destination))) == place


def test_default_directory_comes_first() -> None:
    sources = [item.source for item in with_conventional([artifact("/a"), artifact("/b")])]
    assert sources == ["/logs/artifacts", "/a", "/b"]
    named = [artifact("/a"), artifact("/logs/artifacts/", exclude=["x"])]
    assert with_conventional(named) == named
    of_another = artifact("/logs/artifacts", service="db")
    assert not is_conventional(of_another)
    assert len(with_conventional([of_another])) == 2


# What comes first, what comes next, and whether that still gets its place.
CLAIMS = [
    ("apart", artifact("/a"), artifact("/b"), True),
    ("a name with the same prefix", artifact("/a"), artifact("/ab"), True),
    ("the same artifact twice", artifact("/a"), artifact("/a/"), True),
    ("the same path with other patterns", artifact("/a"), artifact("/a", exclude=["x"]), False),
    ("the same path of another service", artifact("/a"), artifact("/a", service="db"), False),
    ("the same destination", artifact("/a"), artifact("/b", "a"), False),
    ("a part at its own place", artifact("/a"), artifact("/a/b"), False),
    ("an excluded part", artifact("/a", exclude=["b"]), artifact("/a/b"), False),
    ("a part at another place inside", artifact("/a"), artifact("/a/b", "a/c"), False),
    ("a part at another place", artifact("/a"), artifact("/a/b", "c"), True),
    ("a part of a moved artifact", artifact("/a", "m"), artifact("/a/b", "m/b"), False),
    ("another artifact inside it", artifact("/a"), artifact("/b", "a/x"), False),
    ("its parent directory", artifact("/a/b"), artifact("/a"), False),
    ("the manifest", artifact("/a"), artifact("/manifest.json"), False),
    ("everything", artifact("/a"), artifact("/"), False),
]


@pytest.mark.parametrize("case", CLAIMS, ids=[case[0] for case in CLAIMS])
def test_first_artifact_gets_a_contested_path(case: tuple[str, Artifact, Artifact, bool]) -> None:
    _, first, second, gets_it = case
    places = Places()
    assert places.take(first) is None
    taken = places.take(second)
    assert (taken is None) is gets_it


def test_refused_path_remains_free() -> None:
    places = Places()
    assert places.take(artifact("/a")) is None
    assert places.take(artifact("/x", "a/x")) == artifact("/a")
    assert places.take(artifact("/x")) is None


def test_manifest_entries_describe_artifacts() -> None:
    directory = ManifestEntry.of(artifact("/a", exclude=["x"], service="main"), "a", "directory", "ok")
    assert (directory.destination, directory.service, directory.exclude) == ("artifacts/a", "main", ("x",))
    file = ManifestEntry.of(artifact("/", exclude=["x"]), ".", "file", "failed")
    assert (file.destination, file.service, file.exclude) == ("artifacts", None, ())
