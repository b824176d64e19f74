"""The engines of `make bench-engine`, one small module each; they run in separate environments.

`run.py` is the program; it loads a peer by its name and calls

    load(setup)                           -> an engine that has generated nothing yet
    engine.generate(prompts, new_tokens)  -> one Row per prompt: greedy, all prompts at once, EOS ignored

where a Row is a dict with `times` (time.monotonic of each token) and `tokens` (their ids) or `text`. A setup is
a dict with `model`, `gguf` and `cache` (paths), `variant`, `threads`, `kv_tokens`, `max_batch` and `context`. Only
`baton_torch` imports Baton.
"""
