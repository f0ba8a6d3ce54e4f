"""Delay the packets between hosts: relay.py HOSTS MILLISECONDS. Stands in for a switch where the kernel has no netem.

It makes a device tap0, tap1, ... for each host, and forwards each frame to its host, or to all, as long after it was read.
Frames keep the offloads of the kernel, so one of 64 KiB costs as much as a small one.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TAP, NO_INFORMATION, WITH_HEADER = 0x0002, 0x1000, 0x4000  # flags of a tap device
SET_DEVICE, SET_OFFLOAD = 0x400454CA, 0x400454D0  # its ioctls
OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, TCP segments of IPv4 and IPv6
HEADER_BYTES = 10  # the size of the kernel's description of a frame's offloads
LARGEST = 70_000


def make_tap(host: int) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, SET_DEVICE, struct.pack("16sH22x", b"tap%d" % host, TAP | NO_INFORMATION | WITH_HEADER))
    fcntl.ioctl(tap, SET_OFFLOAD, OFFLOADS)
    return tap


def targets(frame: bytes, source: int, hosts: int) -> list[int]:
    """Return the hosts that get a frame; the last byte of an address is the number of its host."""
    to_all = frame[HEADER_BYTES] & 1
    host = frame[HEADER_BYTES + 5]
    return [other for other in range(hosts) if other != source and (to_all or other == host)]


def write(tap: int, frame: bytes) -> None:
    try:
        os.write(tap, frame)
    except OSError:
        pass  # a network may lose a frame, and a device that is not up yet takes none


def relay(taps: list[int], delay: float) -> None:
    waiting: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    for tap in taps:
        poll.register(tap, select.POLLIN)
    hosts = {tap: host for host, tap in enumerate(taps)}
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) * 1000 if waiting else None
        for tap, _ in poll.poll(pause):
            frame = os.read(tap, LARGEST)
            due = time.monotonic() + delay
            waiting.extend((due, taps[host], frame) for host in targets(frame, hosts[tap], len(taps)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, tap, frame = waiting.popleft()
            write(tap, frame)


def main() -> None:
    hosts, milliseconds = int(sys.argv[1]), float(sys.argv[2])
    taps = [make_tap(host) for host in range(hosts)]
    print("ready", flush=True)
    relay(taps, milliseconds / 1000)


if __name__ == "__main__":
    main()
