import re

from ares_exp.runs.resume.episode_plan import episode_seed, plan_episodes


def test_attempts_are_outermost_and_ids_unique() -> None:
    plan = plan_episodes(["b", "a"], attempts=2, seed=0)
    assert [(item.task_name, item.attempt) for item in plan] == [("b", 0), ("a", 0), ("b", 1), ("a", 1)]
    assert len({item.episode_id for item in plan}) == 4


def test_seeds_depend_on_run_task_and_attempt_only() -> None:
    first, second = (plan_episodes(["x", "y"], attempts=3, seed=7) for _ in range(2))
    assert [item.seed for item in first] == [item.seed for item in second]
    assert len({item.seed for item in first}) == 6
    [alone] = plan_episodes(["y"], attempts=1, seed=7)
    assert alone.seed == next(item.seed for item in first if (item.task_name, item.attempt) == ("y", 0))
    assert episode_seed(0, "task", 0) == 1147772574
    assert all(0 <= episode_seed(seed, "t", 0) < 2**31 for seed in range(100))


def test_an_episode_id_is_a_file_name() -> None:
    [item] = plan_episodes(["../we ird/näme" + "x" * 200], attempts=1, seed=0)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,120}", item.episode_id)
