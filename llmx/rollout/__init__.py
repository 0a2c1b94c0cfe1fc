"""Completions from hosts that do not train (``rollout.hosts``).

``server.py`` is a process on a rollout host: it holds a copy of the policy and completes prompts.
``client.py`` is the side of the ranks: rank 0 sends each version of the weights to every server and
shares out the prompts. With ``rollout.vllm_python`` the server holds the policy in vLLM instead
(``vllm_child.py`` in vLLM's environment). ``network.py`` describes the policy, gathers its weights
and builds it anew. ``protocol.py`` is what both sides know, and the supervisor, which starts the
servers (``llmx.launch.supervision.rollout_pool``).

The protocol (``docs/adr/0026-rollout-servers.md``), HTTP over TCP, one connection per request:

    GET  /version             -> {"protocol": 4, "llmx": "0.1", "torch": "2.14", "transformers":
                                  "5.23", "device": "cpu", "model": digest|null, "weights": 12|null}
    PUT  /model               safetensors: what is not trained, and in the metadata the description
    PUT  /weights/12          safetensors: what is trained, as it was after 12 updates
    POST /sample              {"weights": 12|null, "prompts": [[ids]], "rows": [0, 0, 1],
                               "seeds": [n], "sampling": {...}}
                              -> {"weights": 12, "completions": [{"tokens": [ids], "logps": [x],
                                  "sampled_logps": [x], "ended": "stop"}], "seconds": 1.5}

A request that fails is answered with ``{"error": kind, "message": "..."}``, kinds as in
``protocol.Refused``. While a server works it
sends a blank every few seconds, so that a silent server is one that is lost, however long a batch
takes.
"""
