"""Weights by a group of processes: exact, whole, and no member waits for one that is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from strop.runtime import weight_broadcast as broadcast
from strop.runtime.weight_broadcast import BroadcastGroup, GroupBroken, host_group
from strop.runtime.weight_transports import BroadcastTransport
from tests.runtime.members import Member, Team, digest

CPU = torch.device("cpu")
LIMIT = 100.0


def weights(seed: int) -> dict[str, Tensor]:
    """Nine buckets of a megabyte and more, of every kind."""
    dice = torch.Generator().manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.uint8, torch.bool]
    found = {
        f"w{number}": torch.randn(300, 400 + number, generator=dice).mul(50).to(kinds[number % len(kinds)])
        for number in range(24)
    }
    return {
        **found,
        "scalar": torch.tensor(2.5 + seed),
        "flipped": torch.randn(40, 50, generator=dice).T,
        "none": torch.empty(0, 3),
    }


def expected(seed: int, version: int) -> tuple[int, dict]:
    return version, {name: digest(weight) for name, weight in weights(seed).items()}


def have(team: Team) -> list[tuple[int, dict]]:
    return [(version, found) for version, _, found in team.weigh()]


@pytest.fixture
def team() -> Iterator[Team]:
    found = Team(3)
    yield found
    found.close()


@pytest.fixture
def slow_team() -> Iterator[Team]:
    """Its engines stay at the tenth weight until they are let go."""
    found = Team(3, stall="w9")
    yield found
    found.close()


def test_every_member_gets_every_byte(team):
    """One group for many versions, and the spare copy is as good as the original."""
    transport = BroadcastTransport(team, 1, CPU, LIMIT)
    for version in (1, 2, 3):
        sent = transport.send(weights(version).items(), version)
        assert have(team) == [expected(version, version)] * 3
    assert sent >= sum(weight.nbytes for weight in weights(3).values())
    assert [updates for _, updates, _ in team.weigh()] == [3, 3, 3]
    assert team.loads == 0 and transport.stats() == {"weights_regrouped": 0.0}
    transport.close()
    assert len(team.kept) > 8 and not team.expected
    successor = Member(9)
    for box, contents in team.kept:
        successor.call("load", box, contents, 3).result(100)
    version, _, found = successor.call("weigh").result(100)
    assert (version, found) == expected(3, 3)
    successor.end()


def test_no_weights_are_no_version(team):
    transport = BroadcastTransport(team, 1, CPU, LIMIT)
    assert transport.send((), 1) == 0
    assert not team.expected and team.loads == 0
    transport.close()


def kill_when_it_stays(team: Team, victim: int) -> None:
    members = list(team.members)
    while not members[victim].stays:
        time.sleep(0.01)
    members[victim].process.kill()
    for member in members:
        member.let_go()


def test_a_member_killed_in_the_middle_costs_one_version_a_detour(slow_team, caplog):
    team, transport = slow_team, BroadcastTransport(slow_team, 1, CPU, LIMIT)
    killer = threading.Thread(target=kill_when_it_stays, args=(team, 1), daemon=True)
    killer.start()
    transport.send(weights(1).items(), 1)
    killer.join()
    assert have(team) == [expected(1, 1)] * 3
    assert "The group that broadcasts weights broke, so this version goes through the store" in caplog.text
    assert team.loads > 8 and team.lives == [0, 1, 0]
    # The engines of the others have seen one update, and not a half of one and then another.
    assert [updates for _, updates, _ in team.weigh()] == [1, 1, 1]
    team.loads = 0
    transport.send(weights(2).items(), 2)
    assert have(team) == [expected(2, 2)] * 3
    assert team.loads == 0 and transport.stats() == {"weights_regrouped": 1.0}
    assert transport.stats() == {"weights_regrouped": 0.0}
    transport.close()


def test_a_member_that_died_between_versions_is_met_by_the_next_group(team):
    transport = BroadcastTransport(team, 1, CPU, LIMIT)
    transport.send(weights(1).items(), 1)
    transport._copy_kept.result()
    team.members[2].process.kill()
    team.mend(2, 1)
    assert have(team) == [expected(1, 1)] * 3
    transport.send(weights(2).items(), 2)
    assert have(team) == [expected(2, 2)] * 3
    assert team.loads == 0 and transport.stats() == {"weights_regrouped": 1.0}
    transport.close()


def test_a_member_that_nobody_missed_is_noticed_at_once(team):
    """It died when nobody asked it for anything, so it was not replaced."""
    transport = BroadcastTransport(team, 1, CPU, LIMIT)
    for version, victim in ((1, 0), (2, 1)):  # before there is a group, and when there is one
        team.members[victim].process.kill()
        team.members[victim].process.wait(60)
        start = time.monotonic()
        transport.send(weights(version).items(), version)
        assert time.monotonic() - start < 60
        assert have(team) == [expected(version, version)] * 3
        team.loads = 0
        transport.send(weights(version).items(), version)
        assert team.loads == 0
    assert transport.stats() == {"weights_regrouped": 1.0}
    transport.close()


def formed(team: Team, limit: float) -> BroadcastGroup:
    joining: list[Future] = []

    def invite(rendezvous):
        joining.extend(team.join(number, rendezvous) for number in range(team.size))
        return lambda: None

    group = host_group("127.0.0.1", team.size, CPU, limit, invite)
    for done in joining:
        done.result(100)
    return group


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_member_that_stands_still_is_given_up_at_the_limit(team, victim):
    """Its neighbours notice, and tell the rest by leaving."""
    group = formed(team, limit=3.0)
    os.kill(team.members[victim].process.pid, signal.SIGSTOP)
    receipts = [team.receive(number, 1) for number in range(3)]
    start = time.monotonic()
    group.send(
        f'{{"first": true, "last": false, "weights": [], "bytes": {64 << 20}}}',
        torch.zeros(64 << 20, dtype=torch.uint8),
    )
    with pytest.raises(GroupBroken):
        group.wait(0)
        raise next(error for receipt in receipts if (error := receipt.exception(100)))
    group.leave()
    for number in {0, 1, 2} - {victim}:
        with pytest.raises(GroupBroken):
            receipts[number].result(100)
    assert time.monotonic() - start < 60
    os.kill(team.members[victim].process.pid, signal.SIGCONT)
    with pytest.raises(GroupBroken):
        receipts[victim].result(100)


def test_members_do_not_wait_for_a_sender_that_has_left(team):
    group = formed(team, limit=600.0)
    receipts = [team.receive(number, 1) for number in range(3)]
    time.sleep(0.3)
    group.leave()
    start = time.monotonic()
    for receipt in receipts:
        with pytest.raises(GroupBroken):
            receipt.result(100)
    assert time.monotonic() - start < 60


def test_a_group_that_nobody_comes_to(monkeypatch):
    monkeypatch.setattr(broadcast, "SETTLE", 0.3)
    with pytest.raises(GroupBroken, match=r"2 of 2 replicas did not come to 127.0.0.1:\d+ within 0.3 s"):
        host_group("127.0.0.1", 2, CPU, LIMIT, lambda rendezvous: lambda: None)


def test_without_room_for_a_spare_copy_training_goes_on(team, caplog):
    def full(memory):
        raise ValueError("The object store of Ray has no room")

    team.put = full
    transport = BroadcastTransport(team, 1, CPU, LIMIT)
    transport.send(weights(1).items(), 1)
    assert have(team) == [expected(1, 1)] * 3
    transport.close()
    assert "a replica that dies now ends the run: The object store of Ray has no room" in caplog.text
    assert team.why_not == "The object store of Ray has no room" and not team.expected
