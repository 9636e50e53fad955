"""AdamW and Muon with their state in CPU memory, and weights that take turns on the device.

While the sampler has the GPU, the trainer's weights and optimizer state wait in (pinned) CPU memory. The state visits
the device for one parameter at a time inside step(); frozen weights are uploaded for the update and dropped after it.
"""

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of the quintic a x + b x^3 + c x^5 that pushes singular values towards 1


class StateError(ValueError):
    """A stored state is not one of these parameters: the message names what does not fit."""


class _Optimizer:
    """What both optimizers share: the parameters, their state on the CPU, checkpoints, and the schedule of the rate."""

    def __init__(self, params: list[Tensor], lr: float, state_names: tuple[str, ...]):
        self.params, self.lr, self.base_lr = list(params), lr, lr
        self.steps = 0
        if any(p.dtype != torch.float32 for p in self.params):
            raise ValueError("an optimizer's parameters must be fp32 masters")
        self.state = {name: [_pinned(torch.zeros(p.shape)) for p in self.params] for name in state_names}

    def scale_lr(self, factor: float) -> None:
        """Set `lr` to `factor` times the rate given at the start (warm-up and decay)."""
        self.lr = self.base_lr * factor

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The live state as a flat dict for a safetensors file: "steps", and "NAME.INDEX" in the parameters' order."""
        flat = {f"{name}.{i}": t for name, state in self.state.items() for i, t in enumerate(state)}
        return {"steps": torch.tensor(self.steps), **flat}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over a state from tensors(); the learning rate stays what it is. StateError names what does not fit."""
        own = self.tensors()
        for name in sorted(own.keys() | tensors.keys()):
            mine, found = (list(t[name].shape) if name in t else "missing" for t in (own, tensors))
            if mine != found:
                raise StateError(f"the optimizer's state is of other parameters: {name} is {found}, not {mine}")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.steps = int(tensors["steps"])


class AdamW(_Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101). On the CPU equal to torch.optim.AdamW to the bit."""

    def __init__(self, params: list[Tensor], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, lr, ("exp_avg", "exp_avg_sq"))
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient; the state is on the parameter's device only meanwhile."""
        self.steps += 1
        (beta1, beta2), lr = self.betas, self.lr
        step_size = lr / (1 - beta1**self.steps)
        correction = (1 - beta2**self.steps) ** 0.5
        for p, avg_cpu, sq_cpu in zip(self.params, *self.state.values(), strict=True):
            if p.grad is None:
                continue
            avg, sq = avg_cpu.to(p.device, non_blocking=True), sq_cpu.to(p.device, non_blocking=True)
            p.mul_(1 - lr * self.weight_decay)
            avg.lerp_(p.grad, 1 - beta1)
            sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            p.addcdiv_(avg, (sq.sqrt() / correction).add_(self.eps), value=-step_size)
            avg_cpu.copy_(avg)  # nothing to do where it is the same tensor
            sq_cpu.copy_(sq)


class Muon(_Optimizer):
    """Momentum, orthogonalised: for hidden matrices only (Jordan et al. 2024, "Muon: an optimizer for hidden layers").

    The step of a matrix [m, n] is scaled by sqrt(max(1, m / n)). ValueError for a parameter that is no matrix.
    """

    def __init__(self, params: list[Tensor], lr=0.02, momentum=0.95):
        super().__init__(params, lr, ("momentum",))
        if odd := [list(p.shape) for p in self.params if p.ndim != 2]:
            raise ValueError(f"Muon takes matrices, not a parameter of shape {odd[0]}")
        self.momentum = momentum

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient, with Nesterov momentum."""
        self.steps += 1
        for p, momentum_cpu in zip(self.params, self.state["momentum"], strict=True):
            if p.grad is None:
                continue
            momentum = momentum_cpu.to(p.device).lerp_(p.grad, 1 - self.momentum)
            momentum_cpu.copy_(momentum)
            update = orthogonalise(p.grad.lerp(momentum, self.momentum))
            p.add_(update, alpha=-self.lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Push the singular values of `matrix` [m, n] to about 1 (0.7 to 1.2): U S V' becomes nearly U V'.

    Newton-Schulz iteration with the quintic of Jordan et al. 2024, on the side that has fewer rows.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=1e-7)  # the spectral norm is then at most 1
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Chain:
    """Several optimizers that step as one, such as Muon for the hidden matrices and AdamW for the rest."""

    def __init__(self, *parts: _Optimizer):
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def scale_lr(self, factor: float) -> None:
        for part in self.parts:
            part.scale_lr(factor)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": t for i, part in enumerate(self.parts) for name, t in part.tensors().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for i, part in enumerate(self.parts):
            part.load({name.removeprefix(f"{i}."): t for name, t in tensors.items() if name.startswith(f"{i}.")})


class Weights:
    """The weights of a training copy, which live in CPU memory and visit `device` between upload() and release().

    Frozen tensors have one (pinned) CPU copy that is only read: the device's copies are dropped, never copied back.
    Trained parameters (small: an adapter) move both ways. On the CPU nothing moves.
    """

    def __init__(self, module: nn.Module, trained: list[Tensor], device: str | torch.device):
        self.trained, self.device = trained, torch.device(device)
        ours = {id(p) for p in trained}
        self.frozen = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in ours]
        for tensor in self.frozen:
            tensor.data = _pinned(tensor.data.cpu())
        self.host = [tensor.data for tensor in self.frozen]

    def upload(self) -> None:
        """Put all weights on the device."""
        for tensor in (*self.frozen, *self.trained):
            tensor.data = tensor.data.to(self.device, non_blocking=True)

    def release(self) -> None:
        """Leave the device: frozen tensors point to their CPU copy again, trained ones are copied back."""
        for tensor, host in zip(self.frozen, self.host, strict=True):
            tensor.data = host
        for tensor in self.trained:
            tensor.data, tensor.grad = tensor.data.cpu(), None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor
