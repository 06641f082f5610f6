"""Optimizers for the oracle tests: torch's, with options, and awkward ones that users write."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class NeedsAParameter(Optimizer):
    """Looks at its first parameter when built, and keeps state for all of them from the start."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.device = self.param_groups[0]["params"][0].device
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter, device=self.device)

    @torch.no_grad()
    def step(self) -> None:  # takes no closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["sum"].add_(parameter.grad)
                    parameter.sub_(self.state[parameter]["sum"], alpha=group["lr"])


class KeepsCounters(Optimizer):
    """Writes to its groups, keeps state of mixed types, and a counter that is no parameter's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "group_steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, scale: float = 1.0) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["group_steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["history"] = (*state.get("history", ()), [parameter.grad.clone(), None, 0.5])
                parameter.sub_(parameter.grad, alpha=scale * group["lr"] / group["group_steps"])
        return loss


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "Adam tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    "Adam amsgrad foreach": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "foreach": True}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    "AdamW loop": (torch.optim.AdamW, {"lr": 0.1, "foreach": False, "maximize": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "NeedsAParameter": (NeedsAParameter, {}),
    "KeepsCounters": (KeepsCounters, {}),
}
