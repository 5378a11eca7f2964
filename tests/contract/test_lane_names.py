"""No lane waits for a name server: in many containers none answers, and each question takes 10 s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALONE = """
# In namespaces of its own: a name server that counts what it is asked, then a lane, then torch's store.
import fcntl, socket, struct, sys, threading
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x49))  # SIOCSIFFLAGS: loopback, up, running
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
asked = []
def answer():
    while True:
        question, client = server.recvfrom(2048)
        asked.append(question)
        server.sendto(question[:2] + bytes([0x81, 0x83]) + question[4:], client)  # no such name
threading.Thread(target=answer, daemon=True).start()
import torch.distributed as dist
from megastream.transport import gloo
receiver = gloo.GlooReceiver("127.0.0.1")
address = receiver.address(0)
lanes = []
sender = threading.Thread(target=lambda: lanes.append(gloo.connect(address, 20)))
sender.start()
lanes.append(receiver.accept(address, 20))
sender.join()
by_lanes = len(asked)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(by_lanes, len(asked) - by_lanes, flush=True)
for lane in lanes:
    lane.close()
"""
INTO = 'mount --bind "$1" /etc/resolv.conf && exec "$2" -c "$3"'
NAMESPACES = ["unshare", "--map-root-user", "--mount", "--net"]


def test_a_lane_asks_no_name_server(tmp_path: Path) -> None:
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system allows no namespaces of one's own")
    names = tmp_path / "resolv.conf"
    names.write_text("nameserver 127.0.0.1\n")
    command = [*NAMESPACES, "sh", "-c", INTO, "sh", str(names), sys.executable, ALONE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    by_lanes, by_store = map(int, done.stdout.split())
    assert by_store > 0, "torch's store asks, or this test would not notice"
    assert by_lanes == 0
