"""Delivery timeouts, asked by a subscriber or said by a publisher (moqt 12.7)."""

from __future__ import annotations

import asyncio

import pytest

from moqt import Limits, ResetCode, StreamEnd
from moqt.timeouts import Timeouts
from moqt.wire import Parameters, PropertyType, encode_properties
from tests.moqt.scene import at_hand, filled, make_track, objects, piece, sessions
from tests.relay.network import network

pytestmark = pytest.mark.virtual

SIZE = 200_000


def test_the_smaller_of_each_counts() -> None:
    asked = Timeouts.asked(Parameters(object_delivery_timeout=500, subgroup_delivery_timeout=0))
    said = Timeouts.said(
        ((PropertyType.OBJECT_DELIVERY_TIMEOUT, 700), (PropertyType.SUBGROUP_DELIVERY_TIMEOUT, 900))
    )
    assert asked.with_(said) == said.with_(asked) == Timeouts(0.5, 0.9)
    assert Timeouts().with_(Timeouts()) == Timeouts()
    assert Timeouts.said(((PropertyType.OBJECT_DELIVERY_TIMEOUT, 100),), said) == Timeouts(0.1, 0.9)
    assert Timeouts.asked(Parameters(subgroup_delivery_timeout=300), asked) == Timeouts(0.5, 0.3)


@pytest.mark.parametrize("who", ["subscriber", "update", "Track", "Object"])
async def test_objects_that_wait_too_long_are_not_sent(who: str) -> None:
    """The stream is reset with DELIVERY_TIMEOUT; what is published later comes."""
    said = ((PropertyType.OBJECT_DELIVERY_TIMEOUT, 500),)
    track = make_track(b"k", properties=said if who == "Track" else ())
    first = encode_properties(said) if who == "Object" else b""
    async with sessions(track, limits=Limits(receive_buffer=SIZE)) as scene:
        timeout = 0.5 if who == "subscriber" else None
        subscription = await scene.subscriber.subscribe(track.name, object_timeout=timeout)
        if who == "update":
            await subscription.update(object_timeout=0.5)
        for group in range(3):
            piece(track, group, 0, 1000, properties=first)
        await asyncio.sleep(0.3)
        scene.link.stall()
        for group in range(3):
            for number in range(1, 20):
                piece(track, group, number, SIZE)
        await asyncio.sleep(1)
        scene.link.resume()
        piece(track, 3, 0, SIZE)
        items = []
        for _ in range(100):
            items += at_hand(subscription)
            await asyncio.sleep(0.1)
        come = [item.location.group for item in objects(items)]
        codes = {item.group: item.code for item in items if isinstance(item, StreamEnd)}
        assert come.count(3) == 1
        assert len(come) < 43
        assert codes[2] == ResetCode.DELIVERY_TIMEOUT
        assert not scene.publisher.closed
        await subscription.close()


async def test_a_subgroup_that_takes_too_long_is_reset() -> None:
    track = make_track(b"k")
    async with sessions(track, limits=Limits(receive_buffer=SIZE)) as scene:
        subscription = await scene.subscriber.subscribe(track.name, subgroup_timeout=0.5)
        filled(track, [0], 2, 1000)
        piece(track, 1, 0, 1000)
        await asyncio.sleep(1)
        scene.link.stall()
        for number in range(1, 20):
            piece(track, 1, number, SIZE)
        track.end_group(1, 20)
        await asyncio.sleep(1)
        scene.link.resume()
        items = []
        for _ in range(50):
            items += at_hand(subscription)
            await asyncio.sleep(0.1)
        assert {item.group: item.code for item in items if isinstance(item, StreamEnd)} == {
            0: None,
            1: ResetCode.DELIVERY_TIMEOUT,
        }
        await subscription.close()


async def test_timeouts_of_one_subscriber_are_not_those_of_another() -> None:
    """A relay keeps them to itself: each subscriber of a Track may have asked for others."""
    track = make_track(b"k")
    async with network(track, subscribers=2) as net:
        hasty = await net.sessions[0].subscribe(track.name, object_timeout=0.2)
        patient = await net.sessions[1].subscribe(track.name)
        for link in net.links[1:]:
            link.stall()
        for number in range(20):
            piece(track, 0, number, SIZE)
        await asyncio.sleep(1)
        for link in net.links[1:]:
            link.resume()
        await asyncio.sleep(5)
        assert len(objects(at_hand(patient))) == 20
        assert len(objects(at_hand(hasty))) < 20
        await hasty.close()
        await patient.close()
