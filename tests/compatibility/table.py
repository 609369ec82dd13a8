"""The whole table. `python -m tests.compatibility.table` prints it as Markdown."""

from collections import Counter

from tests.compatibility import (
    cases_configuration,
    cases_datasets,
    cases_environment,
    cases_rewards,
    cases_steps,
    cases_trial,
    cases_validity,
    cases_verifier,
)
from tests.compatibility.case import Case

CASES: list[Case] = [
    *cases_validity.CASES,
    *cases_configuration.CASES,
    *cases_environment.CASES,
    *cases_verifier.CASES,
    *cases_steps.CASES,
    *cases_trial.CASES,
    *cases_rewards.CASES,
    *cases_datasets.CASES,
]

TITLES = {
    "1.1": "Files of a task",
    "1.2": "Validity: scan and load",
    "1.3": "Links, .harborignore",
    "1.4": "Instruction",
    "1.5": "task.toml: general parsing",
    "1.6": "task.toml: every field",
    "1.7": "Legacy spellings",
    "1.8": "Network policies",
    "1.9": "Variables and templates",
    "1.10": "Environment definition",
    "1.11": "Commands",
    "1.12": "Health checks",
    "1.13": "Where the verifier works",
    "1.14": "Artifacts, collect hooks",
    "1.15": "Steps: fields, inheritance",
    "1.16": "Skills, tool servers",
    "1.17": "Windows",
    "2.1": "Layout of a container",
    "2.2": "Order of a trial",
    "2.3": "What ends the agent phase",
    "2.4": "Verification, reward files",
    "2.5": "Time limits",
    "2.6": "Steps: order, rewards",
    "2.7": "Oracle, doing nothing",
    "3.1": "Local folders",
    "3.2": "Filters",
    "3.3": "registry.json",
    "3.4": "Git repositories",
    "3.5": "Packages",
    "3.7": "What options mean together",
}


def summary() -> str:
    """How many cases each section has, and where ares_exp deviates on purpose."""
    counts = Counter(case.section for case in CASES)
    deviating = Counter(case.section for case in CASES if case.deviation)
    lines = ["| section | about | cases | deviations |", "|---|---|---|---|"]
    lines += [f"| {key} | {title} | {counts[key]} | {deviating[key] or ''} |" for key, title in TITLES.items()]
    lines += [f"| | **all** | **{len(CASES)}** | **{deviating.total()}** |", ""]
    lines += ["| section | specification | here |", "|---|---|---|"]
    lines += [f"| {case.section} | {case.says} | {case.deviation} |" for case in CASES if case.deviation]
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary())
