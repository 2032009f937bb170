"""Functions of PyTorch replaced for a while, whatever name they were imported under before."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

running_backward = torch._C._current_graph_task_id  # -1 outside of one


class Patches(ExitStack):
    """A context that puts every function back at its end, after an error too."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    @property
    def on(self) -> bool:
        """Whether what runs is to be seen: not a trace of what is compiled, and not another thread."""
        return not torch.compiler.is_compiling() and threading.get_ident() == self._thread

    def put(self, owner: Any, name: str, around: Callable[..., Any], *, apart: bool = False) -> None:
        """Have `around(original, ...)` called in the place of `owner.name`. `apart`: dynamo is not to look into it."""
        original = getattr(owner, name)

        def instead(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self.on else original(*args, **kwargs)

        inherited = isinstance(owner, type) and name not in vars(owner)
        self.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, original)))
        new = instead if isinstance(original, type) else update_wrapper(instead, original)
        new = torch._dynamo.disable(new) if apart else new
        setattr(owner, name, staticmethod(new) if inherited else new)


def is_traced(output: Any) -> bool:
    """Whether it stands for values that are not there: a compiler traces, or torch.func transforms."""
    return isinstance(output, torch.Tensor) and (
        torch._C._functorch.is_functorch_wrapped_tensor(output)
        or torch._is_functional_tensor(output)
        or isinstance(output, torch._subclasses.FakeTensor)
    )


@contextmanager
def quiet() -> Iterator[None]:
    """For what we compute ourselves: recorded by no graph, and seen by no mode of the user's."""
    with _disable_current_modes(), torch.no_grad():
        yield
