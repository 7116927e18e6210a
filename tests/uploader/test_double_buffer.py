"""Write map and read map: order kept, bounded, closing drains."""

import threading

from uploader.double_buffer import DoubleBuffer


def test_requests_come_out_in_order_across_swaps() -> None:
    buffer: DoubleBuffer[int] = DoubleBuffer(capacity=10)
    assert all(buffer.try_put(i) for i in range(3))
    assert buffer.get() == 0
    assert buffer.try_put(3)
    assert [buffer.get() for _ in range(4)] == [1, 2, 3, None]


def test_a_full_write_side_refuses_instead_of_waiting() -> None:
    buffer: DoubleBuffer[int] = DoubleBuffer(capacity=2)
    assert [buffer.try_put(i) for i in range(3)] == [True, True, False]


def test_nothing_is_lost_or_reordered_between_two_threads() -> None:
    buffer: DoubleBuffer[int] = DoubleBuffer(capacity=8)
    seen: list[int] = []

    def consume() -> None:
        while len(seen) < 5000:
            if buffer.wait_for_request(1.0):
                request = buffer.get()
                assert request is not None
                seen.append(request)

    consumer = threading.Thread(target=consume)
    consumer.start()
    for i in range(5000):
        while not buffer.try_put(i):
            pass
    consumer.join(timeout=30)
    assert seen == list(range(5000))
