import pytest

from ares_exp.errors import ConfigError
from ares_exp.wrappers.registry import PresetId

TASKS = [*"abcdefghij"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p", "abcdefghij"),
        ("p:0", "a"),
        ("p:9", "j"),
        ("p:0:3", "abc"),
        ("p:8:", "ij"),
        ("p::2", "ab"),
        ("p::", "abcdefghij"),
        ("p:8:99", "ij"),
        ("p@0/1", "abcdefghij"),
        ("p@3/8", "de"),
        ("a.b-c:1", "b"),
    ],
)
def test_selector_chooses_tasks(text: str, expected: str) -> None:
    asked = PresetId.parse(text)
    assert asked(TASKS) == [*expected]
    assert str(asked) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", ":1", "p:", "p:a", "p:-1", "p:0:1:2", "p:0:-1", "p:1.0", "p:١", "p:" + 5000 * "9"),
        *("@0/2", "p@", "p@1", "p@/2", "p@2/2", "p@0/0", "p@0/2:1", "p:1@0/2"),
    ],
)
def test_invalid_syntax_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="xpected") as caught:
        PresetId.parse(text)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("text", ["p:10", "p:10:", "p:3:3", "p:5:2", "p@0/11"])
def test_empty_selection_is_a_lookup_error(text: str) -> None:
    with pytest.raises(LookupError, match=text) as caught:
        PresetId.parse(text)(TASKS)
    assert isinstance(caught.value, ConfigError)


def test_preset_without_tasks_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="no tasks"):
        PresetId.parse("p")([])
