"""`weightcached demo`: the whole story on one machine, with a table of measured seconds at the end.

Modules: `command` (options, order, clean-up, exit code), `checkpoint` (the model it makes), `processes` (engines and
daemons as child processes), `page_cache` (cold files), `engines` (four starts of an engine), `embeddings` (the real
model), `shards` with its program `weight_set_timing` (WeightSets without an engine), `table` (what is printed).
"""
