"""Megatron-core's distributed optimizer on CPUs, for which it isn't meant.

What differs from Megatron-core as it is installed:

* The modules of ``PORTED`` are compiled anew from their source with ``REPLACEMENTS``: flat buffers
  and small tensors are made on the CPU, and parameters and gradients may be ``torch.FloatTensor``.
  Nothing of torch is patched, so that other candidates stay as they are and a step costs no more.
* AdamW's fused kernel is switched on in the parameter groups: Megatron-core offers no option for
  torch's AdamW, which it falls back to.
* All parameters decay; by default it spares biases and vectors.

The rest is its own: ``initialize_model_parallel`` makes its groups on the default backend; after
backward the gradients, in one flat bucket, are divided by the number of ranks, summed and scattered;
the step clips by the norm, updates and gathers. Overlap of communication is off, as it is by default.
Norms and clipping go tensor by tensor through its fallbacks: the kernels of Apex and Transformer
Engine, which it prefers, need CUDA. It takes the norm whether it clips or not.

Its reduce-scatter is an all-reduce on gloo, of which a rank keeps its part. Hence 1.5 times DDP's
bytes, where a backend with a reduce-scatter of its own would send as many as DDP.
"""

import functools
import importlib
import inspect
from types import ModuleType
from typing import Any

from torch import nn

# In the order of their imports: a module takes what it imports from those before it.
PORTED = (
    "megatron.core.utils",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer",
)
REPLACEMENTS = {
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.current_device()": "torch.device('cpu')",
    "device='cuda'": "device='cpu'",
    'device="cuda"': "device='cpu'",
}


def distribute(module: nn.Module, adamw: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Wraps a module for data parallelism; every rank must call it.

    Args:
        module: its parameters become views into Megatron's flat memory.
        adamw: ``lr``, ``betas`` and ``weight_decay`` of torch's AdamW.

    Returns:
        Megatron's wrapper of the module, and its optimizer, which doesn't clip until
        ``config.clip_grad`` is set.
    """
    distributed, optimizers = _port()
    core = importlib.import_module("megatron.core")
    if not core.parallel_state.is_initialized():
        core.parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    configs = importlib.import_module("megatron.core.distributed")
    transformer = importlib.import_module("megatron.core.transformer.transformer_config")
    wrapped: nn.Module = distributed.DistributedDataParallel(
        transformer.TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1),
        configs.DistributedDataParallelConfig(use_distributed_optimizer=True),
        module,
    )
    beta_1, beta_2 = adamw["betas"]
    optimizer = optimizers.get_megatron_optimizer(
        optimizers.OptimizerConfig(
            optimizer="adam",
            lr=adamw["lr"],
            weight_decay=adamw["weight_decay"],
            adam_beta1=beta_1,
            adam_beta2=beta_2,
            clip_grad=0.0,
            use_distributed_optimizer=True,
        ),
        [wrapped],
        config_overrides={},
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:
        group["fused"] = True
    return wrapped, optimizer


@functools.cache
def _port() -> tuple[ModuleType, ModuleType]:
    """Megatron's modules of data parallelism and of optimizers, which take CPU tensors."""
    modules = {name: importlib.import_module(name) for name in PORTED}
    for module in modules.values():
        recompile_for_cpu_(module)
    return (
        modules["megatron.core.distributed.distributed_data_parallel"],
        modules["megatron.core.optimizer"],
    )


def recompile_for_cpu_(module: ModuleType) -> None:
    """Runs a module's source again with ``REPLACEMENTS``, in its own namespace."""
    source = inspect.getsource(module)
    for text, replacement in REPLACEMENTS.items():
        source = source.replace(text, replacement)
    code = compile(source, inspect.getfile(module), "exec")
    exec(code, vars(module))  # noqa: S102 - the peer's own source, but for the device
