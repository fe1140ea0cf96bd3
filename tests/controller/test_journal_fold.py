"""A launcher that takes over knows what the one before knew, and agents hear each order once.

The state comes from a file that holds what was known at one time and the events since; the file may
end anywhere.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import test_scenarios
from fake_cluster import FAULT_KINDS, FakeCluster, Fault, quick_config
from workbench import Bench, step_done

from deadpool_launch import statelog
from deadpool_launch.agent.line import LauncherGone, Reports
from deadpool_launch.controller import core, mail, persist, takeover
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import (
    Action,
    AgentLost,
    AgentWarm,
    Event,
    Finish,
    InventoryTaken,
    RankExited,
    RankSaid,
)
from deadpool_launch.controller.invariants import validate
from deadpool_launch.controller.states import State, initial_state
from deadpool_runtime import protocol

#: Raise it for a longer search: ``DEADPOOL_SEEDS=5000``.
SEEDS = int(os.environ.get("DEADPOOL_SEEDS", "20"))
_FROM_AGENTS = (RankSaid, RankExited, AgentWarm, InventoryTaken)


class Launcher:
    """What a driver keeps in mind and in its log, without connections."""

    def __init__(self, path: Path, config: Config) -> None:
        self.lost: list[str] = []
        self.log = statelog.StateLog(path, b"job", self.lost.append)
        self.kept = persist.Kept(1, 0.0, initial_state(config), {}, {}, {})
        self.reports = 0
        self.log.begin(self.kept)

    def handle(self, event: Event) -> None:
        number = 0
        if isinstance(event, _FROM_AGENTS):
            self.reports += 1
            number = self.reports
        self.log.event(event, number)
        self.kept = takeover.replayed(self.kept, [(event, number)])


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Launcher]:
    """One for every bench that is made, told the same events; a new file is begun now and then."""
    made: list[Launcher] = []
    dice = random.Random(1)

    class Recorded(Bench):
        def __init__(self, config: Config, check: bool = True) -> None:
            super().__init__(config, check)
            self.launcher = Launcher(tmp_path / f"{len(made)}.state", config)
            made.append(self.launcher)

        def feed(self, event: Event) -> list[Action]:
            if dice.random() < 0.05:
                self.launcher.log.begin(self.launcher.kept)
            self.launcher.handle(event)
            actions = super().feed(event)
            assert self.launcher.kept.state == self.state
            # The end of the job's time does not wait for a launcher; everything else does.
            patient = replace(self.state, stop=None)
            deadline = patient.next_deadline()
            later = takeover.with_later_deadlines(patient, 7.5)
            assert later.next_deadline() == (None if deadline is None else deadline + 7.5)
            return actions

        def free(self, node: str) -> None:
            super().free(node)
            self.launcher.kept = msgspec.structs.replace(self.launcher.kept, state=self.state)
            self.launcher.log.begin(self.launcher.kept)

    monkeypatch.setattr(test_scenarios, "Bench", Recorded)
    return made


def taken_over(launcher: Launcher, path: Path) -> persist.Kept:
    read = statelog.read(path)
    assert (read.job, read.torn_nbytes) == (b"job", 0)
    return takeover.replayed(read.kept, read.entries)


@pytest.mark.parametrize("path", test_scenarios.SCENARIOS, ids=lambda path: path.stem)
def test_every_story_is_known_to_the_next_launcher(
    path: Path, launchers: list[Launcher], tmp_path: Path
) -> None:
    test_scenarios.replay(path.read_text())
    assert taken_over(launchers[0], tmp_path / "0.state") == launchers[0].kept


def random_job(seed: int) -> tuple[FakeCluster, list[Event]]:
    """A job in the fake cluster with some faults, and the events that its launcher got."""
    dice = random.Random(seed)
    config = quick_config(
        nodes=dice.randint(1, 4),
        spares=dice.randint(0, 3),
        nproc_per_node=dice.randint(1, 2),
        spare_start=dice.choice(["at-start", "on-failure"]),
        checkpoint_dir="/checkpoints" if seed % 2 else "",
    )
    faults = [
        Fault(dice.uniform(0.0, 6.0), dice.choice(FAULT_KINDS), dice.randrange(12))
        for _ in range(dice.randint(1, 4))
    ]
    cluster = FakeCluster(config, seed, faults, True, 1 + seed % 3 if seed % 2 else 0)
    events: list[Event] = []
    launcher = cluster.cluster.launcher
    feed = launcher._feed

    def recorded(event: Event) -> None:
        events.append(event)
        feed(event)

    launcher._feed = recorded  # type: ignore[method-assign]
    cluster.run()
    return cluster, events


def test_a_launcher_that_ends_at_any_event_of_any_job_is_taken_over_whole(tmp_path: Path) -> None:
    ended = 0
    for seed in range(SEEDS):
        cluster, events = random_job(seed)
        dice = random.Random(seed)
        launcher = Launcher(tmp_path / "some.state", cluster.cluster.config)
        cut = dice.randrange(len(events) + 1)
        for event in events[:cut]:
            launcher.handle(event)
            if dice.random() < 0.02:
                launcher.log.begin(launcher.kept)
        kept = taken_over(launcher, tmp_path / "some.state")
        assert kept == launcher.kept
        # It goes on as if nothing had happened, and comes to the same end.
        state, finish = kept.state, kept.finish
        validate(takeover.with_later_deadlines(state, dice.uniform(0, 100)))
        for event in events[cut:]:
            state, actions = core.step(state, event)
            finish = next((a for a in actions if isinstance(a, Finish)), finish)
        assert (state, finish) == (cluster.bench.state, cluster.cluster.launcher.finish)
        ended += kept.finish is not None
    assert ended < SEEDS // 2, "the seeds are no test of it"


def logged(tmp_path: Path, steps: int = 3) -> tuple[Launcher, Path, list[State]]:
    """A small job's launcher, its file, and the state after each event."""
    path = tmp_path / statelog.STATE_NAME
    bench = Bench(Config(active=("n1", "n2"), spares=("n3",), nproc_per_node=1))
    launcher = Launcher(path, bench.config)
    states: list[State] = []
    feed = bench.feed

    def both(event: Event) -> list[Action]:
        launcher.handle(event)
        actions = feed(event)
        states.append(bench.state)
        return actions

    bench.feed = both  # type: ignore[method-assign]
    bench.train_to(steps)
    return launcher, path, states


def test_last_event_that_was_not_written_whole_is_cut_off_and_counted(tmp_path: Path) -> None:
    _, path, states = logged(tmp_path)
    whole = path.read_bytes()
    assert len(statelog.read(path).entries) == len(states)
    for nbytes in range(1, 80):
        path.write_bytes(whole[:-nbytes])
        read = statelog.read(path)
        missing = len(states) - len(read.entries)
        assert missing >= 1
        assert takeover.replayed(read.kept, read.entries).state == states[-1 - missing]
        # What is left of the file is whole records and the torn bytes, nothing else.
        path.write_bytes(whole[: len(whole) - nbytes - read.torn_nbytes])
        assert statelog.read(path).torn_nbytes == 0
    path.write_bytes(whole[:-1])
    assert statelog.read(path).torn_nbytes > 0


def test_damage_in_the_middle_is_not_taken_for_a_torn_end(tmp_path: Path) -> None:
    _, path, _ = logged(tmp_path)
    whole = path.read_bytes()
    for at in random.Random(1).sample(range(len(whole)), 200):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(statelog.NoStateLog, match="is damaged"):
            statelog.read(path)


def test_file_of_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / statelog.STATE_NAME
    kept = {"term": "first", "at": 0}
    path.write_bytes(
        statelog._record(b"J", b"") + statelog._record(b"K", msgspec.msgpack.encode(kept))
    )
    with pytest.raises(statelog.NoStateLog, match="does not fit this version"):
        statelog.read(path)
    with pytest.raises(statelog.NoStateLog, match="cannot be read"):
        statelog.read(tmp_path / "nothing")


def test_file_stays_small_however_long_the_job_runs(tmp_path: Path) -> None:
    launcher, path, _ = logged(tmp_path)
    ranks = [(rank.rank, rank.born) for rank in launcher.kept.state.ranks]
    most = begun = 0
    for step in range(4, 20_000):
        for rank, born in ranks:
            event = RankSaid(1.0, f"n{rank + 1}", rank, born, step_done(1, step))
            launcher.log.event(event, step)
        if launcher.log.full:
            launcher.log.begin(launcher.kept)
            begun += 1
        most = max(most, path.stat().st_size)
    assert begun >= 2, "it was never full"
    assert most < 2 << 20


def test_full_disk_costs_the_file_and_not_the_job(tmp_path: Path) -> None:
    launcher, path, _ = logged(tmp_path)
    fd = launcher.log._fd
    assert fd is not None
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), fd)
        launcher.log.event(AgentLost(1.0, "n1", "gone", "seen"), 0)
    assert launcher.lost == ["No space left on device"]
    assert not path.exists()
    launcher.log.event(AgentLost(1.0, "n1", "gone", "seen"), 0)
    launcher.log.begin(launcher.kept)
    assert not path.exists()
    assert len(launcher.lost) == 1


def test_time_without_a_launcher_is_no_patience_used_up() -> None:
    bench = Bench(Config(active=("n1", "n2"), spares=("n3",), nproc_per_node=1))
    bench.train_to(3)
    bench.now = 10.0
    bench.exited(0, signal=9)
    for _ in range(3):
        deadline = bench.state.next_deadline()
        assert deadline is not None
        later = takeover.with_later_deadlines(bench.state, 7.5)
        assert later.next_deadline() == deadline + 7.5
        validate(later)
        assert takeover.with_later_deadlines(later, -1.0) == later
        bench.tick()


def test_who_is_back_is_told_in_a_few_words() -> None:
    bench = Bench(Config(active=("n1", "n2"), spares=("n3",), nproc_per_node=2))
    bench.train_to(3)
    there = {(rank.rank, rank.born) for rank in bench.state.ranks}
    state = bench.state
    assert takeover.who_is_back(state, (), there) == "3 agents are back, no rank was disturbed"
    gone = there - {(1, 1)}
    assert takeover.who_is_back(state, (), gone) == "3 agents are back; rank 1 ended meanwhile"
    assert takeover.who_is_back(state, ["n2"], there) == "2 agents are back, not that of n2"
    without = there - {(2, 1), (3, 1)}
    assert takeover.who_is_back(state, ["n2", "n3"], without) == (
        "1 agent is back, not those of n2, n3"
    )


# ---------------------------------------------------------------- each message once


def test_orders_and_reports_arrive_once_and_in_order_however_often_a_launcher_ends() -> None:
    """Both ends as they are; between them a link that loses what is under way when it breaks."""
    for seed in range(200):
        dice = random.Random(seed)
        box, reports = mail.Mailbox(), Reports()
        term, agent_heard = 1, 0
        obeyed: list[int] = []
        logged_reports: list[int] = []
        down: list[protocol.Order] = []
        up: list[protocol.Report] = []
        newest = posted = told = 0
        for _ in range(120):
            match dice.randrange(6):
                case 0:  # the launcher orders something
                    posted += 1
                    body = protocol.TakeInventory(posted)
                    down.append(protocol.Order(term, box.post(body), body))
                case 1:  # the agent has something to say
                    told += 1
                    up.append(reports.add(protocol.RankExited(told, 1, 0, None)))
                case 2 if down:
                    order = down.pop(0)
                    if order.number > agent_heard:
                        agent_heard = order.number
                        assert isinstance(order.body, protocol.TakeInventory)
                        obeyed.append(order.body.epoch)
                case 3 if up:
                    report = up.pop(0)
                    if report.number > newest:
                        newest = report.number
                        assert isinstance(report.body, protocol.RankExited)
                        logged_reports.append(report.body.rank)
                        box.heard = report.number
                case 4:  # a heartbeat and its answer
                    box.received(agent_heard)
                    reports.heard(box.heard)
                case 5 if dice.random() < 0.3:  # the launcher ends, and another takes over
                    term += 1
                    down, newest = [], box.heard
                    reports.heard(box.heard)
                    up = reports.again()
                    box.received(agent_heard)
                    down = [protocol.Order(term, number, body) for number, body in box.unheard]
                case _:
                    pass
        assert obeyed == list(range(1, len(obeyed) + 1))
        assert logged_reports == list(range(1, len(logged_reports) + 1))
        assert len(obeyed) + len(down) >= posted
        assert len(logged_reports) + len(up) >= told


def test_agent_without_room_gives_up_steps_that_later_ones_cover_and_says_how_many() -> None:
    reports = Reports(most_nbytes=4000)
    reports.add(protocol.RankExited(9, 1, 1, None))
    for step in range(200):
        for rank in (0, 1):
            reports.add(protocol.RankSaid(rank, 1, step_done(1, step)))
    again = reports.again()
    assert len(again) < 100
    assert isinstance(again[0].body, protocol.RankExited)
    newest = {
        report.body.rank: report.body.body
        for report in again[1:-1]
        if isinstance(report.body, protocol.RankSaid)
    }
    assert [newest[rank].step for rank in (0, 1)] == [199, 199]  # type: ignore[union-attr]
    assert again[-1].body == protocol.StepsUntold(401 - (len(again) - 1))
    assert [r.number for r in again] == sorted({r.number for r in again})
    with pytest.raises(LauncherGone, match="more than 4000 bytes"):
        [reports.add(protocol.RankExited(rank, 1, 1, None)) for rank in range(200)]


def test_what_is_kept_comes_back_as_it_was() -> None:
    state = initial_state(Config(active=("n1",), spares=(), nproc_per_node=1, domains={"n1": "r"}))
    kept = persist.Kept(3, 1.5, replace(state, epoch=4), {"n1": mail.Mailbox(2, 1)}, {}, {0: 7})
    assert persist.decode_kept(persist.encode_kept(kept)) == kept
