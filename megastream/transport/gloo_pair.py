"""A two-rank gloo group of its own, and the few waits that are safe on it.

What gloo (torch 2.13, TCP) does, and what follows from it here:

* A wait on `send` or `recv` that reaches its timeout puts the whole group into an error state. A wait on a collective
  does not: it can be repeated. So the one message a receiver may idle on, the header, travels as a two-rank broadcast.
* When the peer's socket closes, operations that are *posted* fail at once, but the one whose bytes are *on the way*
  is forgotten and waits for its whole timeout. So nobody waits on a payload: both ends wait on a small message that is
  posted behind it (the receiver on a trailer, the sender on the acknowledgement).
* A posted operation lives only as long as its Work object: dropped, its message is never sent.
* An operation of the group's own threads that is forgotten in that way keeps the thread for as long as the group's
  timeout, and the group's destructor waits for its threads. So an end that only ever sends keeps that timeout short
  (`GlooPair.limit`): a peer that closes in mid-message then holds `close` up for the deadline of the last send at
  most, and for seconds when it was the closing header.
* Nothing in the Python interface cancels a wait. A wait of 1 ms on a message that never comes does: its timeout
  fails every posted operation of the group (`GlooPair.abort`).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

# torch's own type stubs do not know the operations of a group that is built directly.
dist: Any = torch.distributed
Work = Any

RECEIVER, SENDER = 0, 1
PAYLOAD_TAG, TRAILER_TAG, ACK_TAG, ABORT_TAG = 1, 2, 3, 4

# Operations carry their own deadlines; the group's is only what an idle header wait may take.
_FOREVER = timedelta(days=365)
_TIMER_S = 0.005  # gloo counts in milliseconds, and may come back a little early

_OF_PARENT: list[Any] = []


class PairTimeout(Exception):
    """A wait reached its deadline."""


class PairBroken(Exception):
    """The group is in an error state. The message is gloo's, on one line."""


class GlooPair:
    """One process's end of a two-rank group. Construction blocks until both ends are there.

    `store` is how they find each other (`meeting.py`), `host` a local address: gloo listens on it and nowhere else.
    Raises PairTimeout or PairBroken.
    """

    def __init__(self, store: Any, rank: int, host: str, timeout_s: float) -> None:
        started = time.monotonic()
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        self.peer = 1 - rank
        try:
            self._group = dist.ProcessGroupGloo(store, rank, 2, options)
        except RuntimeError as error:
            late = time.monotonic() - started >= timeout_s * 0.9
            raise (PairTimeout if late else PairBroken)(_one_line(error)) from error
        self._group.set_timeout(_FOREVER)
        # A group with a posted header joins its thread when it is destroyed: forgotten, it would hold up the exit.
        self._finalize = weakref.finalize(self, _end, self._group, self.peer, os.getpid())

    def limit(self, seconds: float) -> None:
        """What is posted from now on lives for so long at most, also when nobody waits for it any more."""
        self._group.set_timeout(timedelta(seconds=seconds))

    def post_send(self, tensor: torch.Tensor, tag: int) -> Work:
        return self._post(self._group.send, tensor, tag)

    def post_receive(self, tensor: torch.Tensor, tag: int) -> Work:
        return self._post(self._group.recv, tensor, tag)

    def post_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """A message from `root` to the other end whose wait may time out and be repeated."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        try:
            return self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise PairBroken(_one_line(error)) from error

    def abort(self) -> None:
        """Fails every operation posted on this group, here and in other threads, and all later ones."""
        group = self._group
        if group is not None:
            _abort(group, self.peer)

    def close(self) -> None:
        """Aborts, and frees sockets and threads."""
        self._group = None
        self._finalize()

    def _post(self, operation: Callable[..., Work], tensor: torch.Tensor, tag: int) -> Work:
        try:
            return operation([tensor], self.peer, tag)
        except RuntimeError as error:
            raise PairBroken(_one_line(error)) from error


def wait(work: Work, until: float) -> None:
    """Waits for a posted operation until `until` (time.monotonic seconds). PairTimeout or PairBroken."""
    left = until - time.monotonic()
    try:
        work.wait(timedelta(seconds=max(left, 0.001)))
    except RuntimeError as error:
        kind = PairTimeout if time.monotonic() >= until - _TIMER_S else PairBroken
        raise kind(_one_line(error)) from error


def _end(group: Any, peer: int, pid: int) -> None:
    """In a process forked from the one that made the group, its threads do not exist, and whatever waits for them would
    wait for ever: `_abort` and the group's destructor. There the group is kept until the process exits."""
    if os.getpid() != pid:
        _OF_PARENT.append(group)
        return
    _abort(group, peer)


def _abort(group: Any, peer: int) -> None:
    try:
        nothing = group.recv([torch.empty(1, dtype=torch.uint8)], peer, ABORT_TAG)
        nothing.wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass  # the timeout is the point; a group that is broken already needs none


def _one_line(error: BaseException) -> str:
    """Gloo's message without its source path and advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rpartition("] [")[0] or lines[0].split("] ", 1)[-1].split(". This is typically")[0]
