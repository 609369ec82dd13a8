"""Compares the package's answers with the expected ones. The package runs in a process of its own: it cannot pass by
ending the process or by replacing the module that checks it."""

import json
import subprocess
import sys

CASES = [
    # function, arguments, expected result ("ValueError": that exception)
    ("moving_average", [[1, 2, 3, 4], 2], [1.5, 2.5, 3.5]),
    ("moving_average", [[2, 4, 6], 3], [4.0]),
    ("moving_average", [[1, 2], 5], []),
    ("moving_average", [[], 1], []),
    ("moving_average", [[0.5, 1.5], 1], [0.5, 1.5]),
    ("moving_average", [[1, 2, 3], 0], "ValueError"),
    ("moving_average", [[1, 2, 3], -1], "ValueError"),
    ("exponential_average", [[1, 3, 5], 0.5], [1, 2.0, 3.5]),
    ("exponential_average", [[4, 8], 0.25], [4, 5.0]),
    ("exponential_average", [[4, 8], 1], [4, 8]),
    ("exponential_average", [[], 0.5], []),
    ("exponential_average", [[1], 0], "ValueError"),
    ("exponential_average", [[1], 1.5], "ValueError"),
]

CHILD = """
import json, sys
sys.path.append("/app")
import smoothing

def answer(name, arguments):
    try:
        return getattr(smoothing, name)(*arguments)
    except Exception as error:
        return type(error).__name__

calls = json.loads(sys.stdin.read())
print(json.dumps([[answer(name, arguments), arguments] for name, arguments in calls]))
"""


def main():
    calls = [[name, arguments] for name, arguments, _ in CASES]
    child = subprocess.run(
        [sys.executable, "-I", "-B", "-c", CHILD], input=json.dumps(calls), stdout=subprocess.PIPE, text=True, timeout=30
    )
    answers = json.loads(child.stdout)
    # The arguments come back too: a function must not change the list it is given.
    wrong = [
        f"{name}{tuple(arguments)}: expected {expected}, got {answer[0]}"
        for (name, arguments, expected), answer in zip(CASES, answers)
        if answer != [expected, arguments]
    ]
    print("\n".join(wrong) or "all cases pass")
    return 1 if wrong or len(answers) != len(CASES) else 0


if __name__ == "__main__":
    sys.exit(main())
