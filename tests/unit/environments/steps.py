"""Shared by the tests of tasks of several stages: a task of two, and what to answer in them."""

from collections.abc import Callable

from ares_exp.tasks.harbor_task import HarborTask

FIRST = "#!/bin/sh\ngrep -c one /work/log > /logs/verifier/reward.txt\n"
SECOND = """#!/bin/sh
echo "{\\"reward\\": 0.5, \\"lines\\": $(grep -c . /work/log)}" > /logs/verifier/reward.json
"""
PASSES = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
DOCKERFILE = "FROM debian:bookworm-slim\nRUN mkdir /work\nWORKDIR /work\n"
TWO_STEPS = "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n"

MakeSteps = Callable[..., HarborTask]
"""The fixture `make_steps`."""
