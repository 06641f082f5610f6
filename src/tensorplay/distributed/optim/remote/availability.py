"""Whether this process can make RPCs."""

HOW_TO_INIT = """\
    torch.distributed.rpc.init_rpc("trainer", rank=0, world_size=2)

on every worker, each with its own name and rank, and MASTER_ADDR and MASTER_PORT set"""


def require_rpc() -> None:
    """Raises ``RuntimeError`` with the cure if this process can't make RPCs."""
    from torch.distributed import rpc

    if not rpc.is_available():
        raise RuntimeError(
            "DistributedOptimizer over RRefs needs RPC, which this build of PyTorch doesn't have "
            "(torch.distributed.rpc.is_available() is False); builds for Linux and macOS have it"
        )
    try:
        rpc.get_worker_info()
    except RuntimeError as error:
        raise RuntimeError(
            f"DistributedOptimizer over RRefs needs RPC, which is not initialised; call\n\n{HOW_TO_INIT}"
        ) from error
