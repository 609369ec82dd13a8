"""A causal model of two layers and a byte-level tokenizer, made here: no download, and no sense in what it says."""

from typing import Any

HERMES = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Call tools as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The chat template of the family of Hermes and Qwen, in short."""


def tiny_tokenizer(chat_template: str = HERMES) -> Any:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(1)  # more only get in each other's way with so small a model
    vocabulary = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    made.chat_template = chat_template
    return made


def tiny_model(tokenizer: Any, *, seed: int = 0, context: int = 8192, width: int = 32) -> Any:
    """Makes a model with random weights, always the same ones for a seed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def largest_gap(model: Any, rows: Any, *, temperature: float = 1.0) -> float:
    """Returns the largest difference between recorded and recomputed log-probabilities of sampled tokens."""
    import torch

    gaps = [0.0]
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*row.ids]], device=model.device)).logits[0, :-1].float()
        found = torch.log_softmax(logits / temperature, -1)
        places = [place for place in range(1, len(row.ids)) if row.mask[place]]
        gaps += [abs(row.logprobs[place] - found[place - 1, row.ids[place]].item()) for place in places]
    return max(gaps)
