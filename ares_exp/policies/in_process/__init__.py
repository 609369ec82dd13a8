"""Generation by a model in this process: prompts of token ids, batches of rows, sampling, the model's thread.

Imports torch and transformers inside the functions that need them; imported by the policies that know token ids.
"""
