"""What classes of the script's own keep outside of what torch saves comes back, or is refused."""

from __future__ import annotations

import enum
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from state_copies import state_of, take
from torch import nn

from deadpool_runtime.attributes import Attributes
from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.state import TrainingState

Train = Callable[[int], None]


class Running(nn.Module):
    """Each forward pass depends on all that were before it, by attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.mean = torch.zeros(2)
        self.total: torch.Tensor | None = None
        self.calls = 0
        self.seen: list[float] = []
        self.weights = [self.linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(x[0, 0]))
        self.mean.mul_(0.9).add_(x.mean(0))
        self.total = x.sum() if self.total is None else self.total + x.sum()
        self.activation = self.linear(x + self.mean)
        scale = self.calls + sum(self.seen) + float(self.total)
        return self.activation * scale  # type: ignore[no-any-return]


class Counting(torch.optim.SGD):
    """Its options follow from an attribute, and from state that is no parameter's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        shared: Any = self.state
        shared.setdefault("global", {"steps": 0})["steps"] += 1
        super().step()
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow.lerp_(parameter, 0.5 / self.count)
            parameter.copy_(slow * shared["global"]["steps"])


class Mood(enum.Enum):
    CALM = 1
    WILD = 3


@dataclass
class Memory:
    count: int = 0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=2))


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclass(frozen=True)
class Frozen:
    inside: dict[str, list[Memory]]


class Remembering(nn.Module):
    """The same by values of many kinds, by objects, and by numbers of a module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(2, 1), nn.Dropout(0.1)
        self.recent: deque[float] = deque(maxlen=2)
        self.kinds: Counter[Any] = Counter()
        self.sums: dict[Any, float] = defaultdict(float)
        self.array, self.number = numpy.zeros(3), numpy.float64(0.5)
        self.wide = torch.zeros(3000)
        self.long = [0.0] * 2000
        self.tensors = [torch.zeros(2) for _ in range(1500)]
        self.vocabulary = {f"word {i}": i for i in range(30_000)}
        self.deep = {"a": {"b": {"c": {"d": {"e": 0}}}}}
        self.known: frozenset[int] = frozenset()
        self.mood, self.kind = Mood.CALM, torch.float32
        self.memory, self.slotted = Memory(), Slotted()
        self.frozen = Frozen({"a": [Memory(), Memory()]})
        self.space = types.SimpleNamespace(count=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = float(x[0, 0])
        self.recent.append(value)
        self.kinds["seen"] += 1
        self.sums[len(self.sums) % 2] += value
        self.array += value
        self.number = self.number * 0.9
        self.wide.data.add_(value)  # torch does not count that
        self.long[7] += value
        self.tensors[8].add_(value)
        self.vocabulary[f"seen {value}"] = len(self.vocabulary)
        self.deep["a"]["b"]["c"]["d"]["e"] += 1
        self.known |= {len(self.known)}
        self.mood = Mood.WILD if self.mood is Mood.CALM else Mood.CALM
        self.kind = torch.float64 if self.kind == torch.float32 else torch.float32
        memories = [self.memory, self.frozen.inside["a"][1]]
        for memory in memories:
            memory.count += 1
            memory.last.append(value)
        self.slotted.count += 1
        self.space.count += 2
        self.dropout.p = min(0.9, self.dropout.p + 0.1)
        self.linear.factor = getattr(self.linear, "factor", 1.0) * 1.1  # type: ignore[assignment]
        scale = sum(self.recent) + self.kinds["seen"] + sum(self.sums.values()) + self.number
        scale += self.array.sum() + float(self.wide[0]) + self.long[7] + float(self.tensors[8][0])
        scale += self.deep["a"]["b"]["c"]["d"]["e"] + len(self.known) + self.mood.value
        scale += len(self.vocabulary) + torch.finfo(self.kind).bits
        scale += sum(memory.count + sum(memory.last) for memory in memories)
        scale += self.slotted.count + self.space.count + self.dropout.p + float(self.linear.factor)  # type: ignore[arg-type]
        return self.linear(x) * float(scale)  # type: ignore[no-any-return]


def build(module: nn.Module, kind: Any) -> tuple[Train, TrainingState]:
    torch.manual_seed(1)
    optimizer = kind(module.parameters(), lr=0.01)
    state = state_of(module, optimizer)

    def train(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        module(torch.randn(3, 2, generator=generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train, state


def linear() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(2, 1)


def running() -> nn.Module:
    torch.manual_seed(2)
    return Running()


def remembering() -> nn.Module:
    torch.manual_seed(2)
    return Remembering()


@pytest.mark.parametrize(
    ("module", "kind"),
    [(running, torch.optim.SGD), (linear, Counting), (remembering, torch.optim.SGD)],
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_training_goes_on_as_it_went(module: Callable[[], nn.Module], kind: Any, at: int) -> None:
    train, reference = build(module(), kind)
    for number in range(5):
        train(number)
    train, state = build(module(), kind)
    for number in range(at):
        train(number)
    copied = take(state)
    train(at)  # the interrupted step
    for train_here, here in ((train, state), build(module(), kind)):
        copied.restore(here)
        for number in range(at, 5):
            train_here(number)
        assert here.part_digests() == reference.part_digests()


class Holding(nn.Module):
    """Puts what it is told into an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.held: Any = None
        self.generator = torch.Generator()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(1 << 19), "2.1 MB are too large"),
        (torch.zeros(3).to_sparse(), "cannot be saved"),
        ([torch.zeros(3, device="meta")], "cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(value: Any, words: str) -> None:
    module = Holding()
    state = state_of(module)
    module.held = value
    with pytest.raises(UnsupportedState, match=rf"held.*\(Holding\).*{words}"):
        take(state)


def test_a_generator_that_a_module_draws_from_is_refused_unless_it_is_saved() -> None:
    module = Holding()
    state = state_of(module)
    take(state)
    torch.rand(1, generator=module.generator)
    with pytest.raises(UnsupportedState, match=r"generator .* of the module 0"):
        take(state)


def test_an_object_in_the_place_of_another_is_refused_or_taken_back() -> None:
    module = Holding()
    module.held = {"memory": Memory()}
    first = module.held["memory"]
    state = state_of(module)
    copied = take(state)
    module.held["memory"] = Memory()  # equal to what a new process has
    take(state)
    module.held["memory"] = Memory(count=1)
    with pytest.raises(UnsupportedState, match=r"held.memory \(Memory\) of the module 0"):
        take(state)
    copied.restore(state)
    assert module.held["memory"] is first


def test_what_an_object_keeps_at_hand_may_be_large() -> None:
    module = Holding()
    module.held = types.SimpleNamespace(count=0)
    state = state_of(module)
    module.held.cached = torch.zeros(1 << 19)
    take(state)
    module.held.count = torch.zeros(1 << 19)
    with pytest.raises(UnsupportedState, match=r"count of the object held .*2.1 MB are too large"):
        take(state)


def test_a_look_at_many_modules_of_torch_does_not_look_at_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A counter that changes in each step must not cost a walk over all that is registered."""
    module = nn.Sequential(*(Holding() for _ in range(3)))
    state = state_of(module)
    take(state)
    module[1].held = 1  # type: ignore[assignment]
    monkeypatch.setattr(Attributes, "_find_registered", lambda _: pytest.fail("a walk"))
    take(state)


def test_objects_of_a_module_are_its_own_affair() -> None:
    module = Holding()
    state = state_of(module)
    module.held = [object()]
    module.held.append(module.held)
    copied = take(state)
    module.held = object()
    copied.restore(state)


class Schedule:
    """An object that an optimizer asks for its next value."""

    count = 0

    def __call__(self) -> float:
        self.count += 1
        return 0.1 / self.count


class Scheduled(torch.optim.SGD):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.schedule = Schedule()

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = self.schedule()
        return super().step()


@pytest.mark.parametrize("when", ["a good step", "an interrupted step"])
def test_an_object_that_an_optimizer_changes_is_refused(when: str) -> None:
    train, state = build(linear(), Scheduled)
    copied = take(state)
    train(0)
    with pytest.raises(UnsupportedState, match=r"schedule.*Scheduled"):
        take(state) if when == "a good step" else copied.restore(state)
