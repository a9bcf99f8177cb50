# SPDX-License-Identifier: Apache-2.0
"""vLLM with nvcomm beside it: vLLM finds the plugin by itself, and says so in its log.

python examples/04_vllm.py [MODEL]            with the plugin; default: a tiny Llama of random weights, no download
VLLM_PLUGINS= python examples/04_vllm.py [MODEL]        without: the same tokens
"""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

RANKS = 2
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [200, 3, 90, 41, 17, 17]}]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    if importlib.util.find_spec("vllm") is None:
        print("skipped: vLLM is not installed")
        sys.exit(0)
    # On CPUs vLLM wants a list of cores for each rank, and no network.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0|{min(1, (os.cpu_count() or 1) - 1)}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        llm = LLM(
            sys.argv[1] if len(sys.argv) > 1 else folder,
            load_format="auto" if len(sys.argv) > 1 else "dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=RANKS,
            enforce_eager=True,
            max_model_len=64,
            # Options of nvcomm's communicator, all of them optional.
            additional_config={"nvcomm": {"max_bytes": 1 << 20}},
        )
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    print("tokens", [list(output.outputs[0].token_ids) for output in outputs])


if __name__ == "__main__":
    main()
