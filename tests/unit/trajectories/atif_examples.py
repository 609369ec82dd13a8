"""ATIF documents that Harbor's validator accepts."""

from typing import Any


def counting() -> dict[str, Any]:
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": "run-7f3a",
        "trajectory_id": "root",
        "agent": {"name": "ares-shell", "version": "0.1.0", "model_name": "local/tiny-coder"},
        "steps": [
            {"step_id": 1, "source": "system", "message": "You operate a Linux shell."},
            {
                "step_id": 2,
                "source": "user",
                "timestamp": "2026-01-05T09:00:00Z",
                "message": "Count the lines in data.csv.",
            },
            {
                "step_id": 3,
                "source": "agent",
                "message": "Counting.",
                "llm_call_count": 1,
                "tool_calls": [{"tool_call_id": "t1", "function_name": "sh", "arguments": {"cmd": "wc -l data.csv"}}],
                "observation": {"results": [{"source_call_id": "t1", "content": "42 data.csv"}]},
                "metrics": {
                    "prompt_tokens": 4,
                    "completion_tokens": 3,
                    "prompt_token_ids": [11, 12, 13, 14],
                    "completion_token_ids": [21, 22, 23],
                    "logprobs": [-0.11, -0.02, -0.4],
                },
            },
            {"step_id": 4, "source": "agent", "message": "There are 42 lines."},
        ],
        "final_metrics": {"total_prompt_tokens": 4, "total_completion_tokens": 3, "total_steps": 4},
    }
