"""The page about remote parameters: its code runs, top to bottom, on a trainer and two owners."""

import os
import re
import socket
import tempfile
import warnings
from pathlib import Path

import torch.distributed as dist

from tests.launch import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "remote.md"


def _blocks() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _run(port: int, folder: str) -> str:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TP_SOCKET_IFADDR"] = "127.0.0.1"
    os.chdir(folder)
    warnings.simplefilter("ignore")  # torch's RPC uses what torch has deprecated
    rank = dist.get_rank()
    owner, *trainer = _blocks()
    if rank == 0:
        names: dict[str, object] = {}
        exec("\n".join(trainer), names)  # noqa: S102 - the test
        exec("rpc.shutdown()", names)  # noqa: S102 - the test
        return repr(names["careful"]) + repr(names["optimizer"])
    code = owner.replace('"owner1", rank=1', f'"owner{rank}", rank={rank}')
    exec(code, {})  # noqa: S102 - the test
    return ""


def test_the_code_runs() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        shown, *_ = run_ranks(3, _run, port, folder)
        assert Path(folder, "optimizer.pt").stat().st_size > 0
    assert "parameters: 2 on owner1, 2 on owner2" in shown
    assert "parameters: 2 on owner1, 4 on owner2" in shown


def test_links_lead_somewhere() -> None:
    prose = re.sub(r"```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!http)(.*?)\)", prose):
        assert (PAGE.parent / link).exists(), link
    assert "(docs/remote.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
