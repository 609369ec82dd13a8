"""Forty texts that an agent or a task might write to get into a page, and a run that has them in every field."""

import json
from pathlib import Path

import yaml

from ares_exp.containers.activity import CommandRecord
from ares_exp.records.results import EpisodeResult, ErrorInfo, Outcome, StageResult
from ares_exp.records.run_dir import RunDir
from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

OWN = "window.__owned=1"
PAYLOADS = (
    f"<script>{OWN}</script>",
    f"</script><script>{OWN}</script>",
    f"</ScRiPt ><script>{OWN}//",
    f"<img src=x onerror={OWN}>",
    f"<svg/onload={OWN}>",
    f"<svg><script>{OWN}</script></svg>",
    f"<iframe srcdoc='<script>parent.{OWN}</script>'>",
    f"<body onload={OWN}>",
    f"<input autofocus onfocus={OWN}>",
    f"<details open ontoggle={OWN}>x</details>",
    f"<a href=javascript:{OWN}>x</a>",
    f"javascript:{OWN}",
    f"data:text/html,<script>{OWN}</script>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<style>@import '//evil.example/x.css';*{display:none}</style>",
    "<object data=//evil.example></object>",
    f"<form action=//evil.example><button autofocus onfocus={OWN}>",
    f"<!--<script>{OWN}</script>",
    f"--><script>{OWN}</script>",
    f"]]><script>{OWN}</script>",
    f"\"'><script>{OWN}</script>",
    f"' onmouseover='{OWN}",
    f"\\u003cscript\\u003e{OWN}",
    f"&lt;script&gt;{OWN}&lt;/script&gt;",
    f"{{{{7*7}}}}{{% {OWN} %}}",
    f"${{{OWN}}}",
    f"`${{{OWN}}}`",
    f'"}};{OWN};//',
    f'\\";{OWN};//',
    f"\u2028{OWN}\u2029",
    "\ud83d half a pair \udc00",
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m\x1b]8;;http://evil.example\x07x",
    "\u202egnp.exe\u202c \u2066bidi\u2069",
    "\x00\x01\x08\x7f\x9b31m",
    "zero\u200bwidth\ufeff\u00ad\U000e0041",
    "__proto__",
    "constructor",
    '=HYPERLINK("http://evil.example")',
)
IN_BROWSERS = "\u202e\u2066\u200b\x1b\x07\x00"
"""Characters that must not reach the eye as they are."""


def hostile_run(path: Path, *, long_line: int = 10_000_000) -> list[str]:
    run = RunDir(path)
    run.trajectories.mkdir(parents=True)
    lines, ids = [], []
    for number, text in enumerate(PAYLOADS):
        is_name = "/" not in text and "\0" not in text and "\ud83d" not in text
        episode_id = f"{text}-{number}" if is_name else f"e{number}"
        ids.append(episode_id)
        result = EpisodeResult(
            episode_id,
            f"{text} {number}",
            number % 3,
            0,
            Outcome.AGENT_ERROR if number % 2 else Outcome.COMPLETED,
            None if number % 2 else 0.5,
            rewards={text: 1.0},
            error=ErrorInfo(text, text) if number % 2 else None,
            num_steps=2,
            started_at=1.0,
            finished_at=5.0,
            phase_sec={text: 1.0, "verify": 0.5},
            container_image=text,
            note=text,
            stages=(StageResult(text, 0.5),),
        )
        lines.append(json.dumps(result.to_dict()) + "\n")
        trajectory = _trajectory(result, text, long_line if number == 0 else 100)
        (run.trajectories / f"e{number}.json").write_text("".join(dump_episode(trajectory)), encoding="utf-8")
        _files(run.files / episode_id / "verifier", text, number)
    run.episodes.write_text("".join(lines))
    texts = [text.encode(errors="backslashreplace").decode() for text in PAYLOADS]
    run.config.write_text(yaml.safe_dump({f"key{number}": {text: text} for number, text in enumerate(texts)}))
    run.provenance.write_text(json.dumps({text: text for text in PAYLOADS}))
    run.log.write_text("\n".join(PAYLOADS), errors="backslashreplace")
    run.sessions.write_text(json.dumps({"started": 1.0, "hostname": PAYLOADS[0]}) + '\n{"ended": 5.0}\n')
    return ids


def _files(folder: Path, text: str, number: int) -> None:
    folder.mkdir(parents=True)
    (folder / f"out{number}.txt").write_text(text, errors="backslashreplace")
    if "/" not in text and "\0" not in text:
        (folder / text.encode(errors="backslashreplace").decode()).write_text(text, errors="backslashreplace")


def _trajectory(result: EpisodeResult, text: str, long_line: int) -> EpisodeTrajectory:
    call = {"id": text, "name": text, "arguments": json.dumps({text: text})}
    messages = [{"role": "user", "content": text}, {"role": text, "content": [{"type": "text", "text": text}]}]
    action = {
        "data": [{"content": text}, {"thinking": text}, call, {text: text}],
        "cost": 0.0,
        "usage": {"prompt_tokens": 1, "generated_tokens": 1},
        "model": text,
        "finish_reason": text,
    }
    first = {"messages": messages, "system_prompt": text, "metadata": {text: text}}
    second = {"messages": [*messages, {"role": "tool", "content": "x" * long_line + text, "tool_calls": [call]}]}
    steps = (
        StepRecord(0, "FIRST", first, None, None, None, 1.0, environment_sec=0.5),
        StepRecord(1, "MID", second, action, 0.0, 1.0, 2.0, 0.5, 0.5, 0.5, (CommandRecord(text, 1, 0.1),)),
        StepRecord(
            2, "LAST", None, action, result.reward, 0.0, 4.0, 0.5, 0.5, 0.5, (CommandRecord(text, None, 0.1, True),)
        ),
    )
    return EpisodeTrajectory(
        result.episode_id,
        result.task_name,
        steps,
        1.0,
        5.0,
        result.reward,
        3,
        False,
        result.outcome,
        error=result.error,
        metadata={
            "agent": text,
            "model": text,
            "policy": text,
            text: text,
            "lineage": {"parent": text, "step": 1, "root": text},
        },
        rewards={text: 1.0},
    )
