"""What generates tokens inside this process: prompts of token ids, batches of rows, sampling, a model's own thread.

Imports torch and transformers inside the functions that need them; imported by the policies that know token ids.
"""
