"""What every optimizer here stands on; knows no feature. Each file imports only those above it.

``coupled_optimizers`` (which classes can't be divided); ``ranks`` -> ``tagged_json`` -> ``local_shard`` -> ``parameter_spec`` -> ``partition`` -> ``bucket_layout`` (plans, pure)
-> ``flat_buffer`` (memory) -> ``host_memory``, ``host_links``, ``host_peers``, ``host_messages`` and
``host_average`` (between ranks of one host, below the backend) -> ``collectives`` (the only place that
communicates) -> ``agreement`` (ranks find out together that something is wrong) -> ``gradient_buckets``, ``backward_pass`` and others ->
``step_schedule`` (stepping during backward) ->
``gradient_reducer`` (backward -> averaged gradients) -> ``wrapped_optimizer`` (an Optimizer around one)
-> ``state_dicts`` (full state dicts and parts of them).
"""
