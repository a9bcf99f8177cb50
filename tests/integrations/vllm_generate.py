# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of a tiny Llama with random weights on two tensor-parallel CPU ranks; nothing is downloaded.

python tests/integrations/vllm_generate.py FOLDER

Leaves in FOLDER: the model; `report.json` with the tokens, the calls that nvcomm carried on each rank, and the tokens
with one rank's share left out of every sum, the control that sums have an influence on tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

LAST_CORE = (os.cpu_count() or 1) - 1
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0|{min(1, LAST_CORE)}",  # a list of cores for each rank
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions below are sent to the workers
}
RANKS = 2
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of a size with which every layer counts: with the weights of load_format="dummy" sums have no influence on tokens.
STD = {"embed_tokens": 1.0, "lm_head": 1.0, "default": 0.15}
PROMPTS = ([5, 6, 7, 8], [200, 3, 90, 41, 17, 17])


def write_model(folder):
    """A checkpoint of random weights; the same for any number of ranks."""
    import torch
    from safetensors.torch import save_file

    hidden, wide, vocabulary = (MODEL[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    for layer in range(MODEL["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        shapes |= {f"{place}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{place}.mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")}
        shapes |= {f"{place}.mlp.down_proj": (hidden, wide)}
        shapes |= {f"{place}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    numbers = torch.Generator().manual_seed(20_261)
    weights = {}
    for name, shape in shapes.items():
        std = STD.get(name.rpartition(".")[2], STD["default"])
        values = torch.randn(shape, generator=numbers) * std if len(shape) == 2 else torch.ones(shape)
        weights[f"{name}.weight"] = values.to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(MODEL))


def calls(worker):
    """How many collectives nvcomm carried on this rank."""
    from vllm.distributed import get_tp_group

    ours = getattr(get_tp_group().device_communicator, "nvcomm", None)
    return 0 if ours is None else ours.comm.stats().calls


def leave_out_rank_1(worker):
    """From now on rank 1 adds nothing to any sum."""
    from vllm.distributed import get_tp_group

    ours = get_tp_group().device_communicator.nvcomm
    summed = ours.custom_all_reduce
    ours.custom_all_reduce = lambda x: summed(x * (ours.rank != 1))


def main():
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    folder = Path(sys.argv[1])
    write_model(folder)
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    llm = LLM(
        str(folder), skip_tokenizer_init=True, tensor_parallel_size=RANKS, enforce_eager=True, max_model_len=64,
        enable_prefix_caching=False,
    )  # fmt: skip

    def tokens():
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    report = {"tokens": tokens(), "calls": llm.collective_rpc(calls)}
    report["seconds"] = round(time.monotonic() - started, 1)
    llm.collective_rpc(leave_out_rank_1)
    report["control"] = tokens()
    (folder / "report.json").write_text(json.dumps(report))
    sys.stdout.write(f"\n{report}\n")


if __name__ == "__main__":
    main()
