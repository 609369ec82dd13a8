from ares_exp.agents.conversing_agent import as_plain_chat


def test_tool_calls_become_text() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "sh", "arguments": '{"cmd": "ls"}'}}
    written = '<tool_call>{"name": "sh", "arguments": "{\\"cmd\\": \\"ls\\"}"}</tool_call>'
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    assert as_plain_chat(
        [
            {"role": "user", "content": [image]},
            {"role": "assistant", "content": "Look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "a b"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "content": "Done."},
        ]
    ) == [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": f"Look.\n{written}"},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": f"{written}\n{written}"},
        {"role": "user", "content": "Be brief."},
        {"role": "assistant", "content": "Done."},
    ]
