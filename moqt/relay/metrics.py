"""What a relay counts, for Prometheus; made when the page is asked for.

The text is prometheus_client's, which has no dependencies of its own, is in every environment of vLLM, and
adds the metrics of the process (memory, processor time, open files).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moqt.relay.pages import Page
from moqt.relay.status import Status

__all__ = ["Metrics"]

PREFIX: Final = "moqt_relay_"


class Metrics(Collector):
    """The page /metrics."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self) -> Page:
        """The text exposition format."""
        return Page(generate_latest(self._registry), CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """Everything, at this moment."""
        relay, server, stats = self._status.relay, self._status.server, self._status.stats
        sessions, feeds = list(stats.sessions), list(relay.feeds.values())
        upstream = sum(map(relay.is_upstream, sessions))
        sides = {"upstream": upstream, "downstream": len(sessions) - upstream}
        yield _gauge("sessions", "MOQT sessions", _by_name(sides), "side")
        yield _counter("sessions_started", "MOQT sessions begun", stats.started)
        yield _counter("sessions_ended", "MOQT sessions ended, by code", _by_name(stats.ended), "code")
        yield _counter(
            "connections_refused",
            "First packets of clients that a limit left without an answer",
            server.connections_refused,
        )
        yield _counter("requests", "Requests of peers, by type", _by_name(stats.requests), "type")
        yield _counter(
            "requests_refused",
            "Requests answered REQUEST_ERROR: UNAUTHORIZED by the policy, EXCESSIVE_LOAD by a limit",
            stats.refused.items(),
            "type",
            "code",
        )
        yield _gauge("requests_open", "Requests of peers that are open", sum(s.serving for s in sessions))
        publishing = [session.publishing for session in sessions]
        yield _gauge("subscriptions", "Subscriptions served", sum(p.subscriptions for p in publishing))
        yield _gauge("fetches", "Fetches served", sum(p.fetches for p in publishing))
        yield _counter(
            "publish_done",
            "PUBLISH_DONEs sent, by code: TOO_FAR_BEHIND to readers that were too slow",
            _by_name(stats.done),
            "code",
        )
        yield _gauge(
            "backlog_bytes", "Bytes that wait for slow readers", sum(s.scheduler.weight for s in sessions)
        )
        yield _gauge(
            "buffered_bytes", "These, Objects in part and unread bytes", sum(s.buffered for s in sessions)
        )
        yield _counter("received_bytes", "UDP payload received", stats.received)
        yield _counter("sent_bytes", "UDP payload sent", stats.sent)
        times = [time for s in sessions if (time := s.connection.traffic.rtt) is not None]
        yield _gauge("rtt_seconds_max", "The longest smoothed round-trip time", max(times, default=0.0))

        yield _gauge("namespaces", "Namespaces known", len(relay.tracks.namespaces))
        yield _gauge("tracks", "Tracks known", len(feeds))
        yield _gauge(
            "upstream_subscriptions",
            "Subscriptions at publishers",
            sum(len(feed.publishers) for feed in feeds),
        )
        yield _counter(
            "upstream_subscriptions_accepted", "Subscriptions that publishers accepted", relay.subscribed
        )
        yield _counter("upstream_fetches_accepted", "Fetches that publishers answered", relay.fetched)
        yield _gauge("upstream_fetches", "Holes being fetched", sum(feed.fetching for feed in feeds))
        yield _counter("upstream_connects", "Times that an upstream was reached", self._status.connects)
        yield _counter(
            "upstream_losses", "Times that an upstream was lost or not reached", self._status.losses
        )
        yield _gauge("cache_bytes", "Bytes that cached Objects take", relay.cache.bytes)
        yield _gauge("cache_limit_bytes", "Bytes that they may take", relay.cache.limit)
        yield _gauge("cache_objects", "Objects in the cache", len(relay.cache))
        yield _counter("cache_hits", "Objects that fetches and fills took from the cache", relay.cache.hits)
        yield _counter("cache_misses", "Objects that had to be fetched for them", relay.cache.misses)
        yield _counter("cache_evictions", "Objects thrown out to make room", relay.cache.evicted)
        if (store := relay.store) is not None:
            yield _gauge("cache_dir_bytes", "Bytes of the cache on disk that hold something", store.bytes)
            yield _gauge("cache_dir_limit_bytes", "Bytes that it may have", store.limit)
            yield _gauge("cache_dir_unwritten", "Objects and Tracks that wait for the disk", store.unwritten)
            yield _counter("cache_dir_skipped", "Objects that the disk did not take", store.skipped)


Values = float | Iterable[tuple[Sequence[str], float]]
"""One value, or values each with those of the labels."""


def _counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _family(CounterMetricFamily(PREFIX + name, text, labels=labels), values)


def _gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _family(GaugeMetricFamily(PREFIX + name, text, labels=labels), values)


def _family(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for key, value in values if isinstance(values, Iterable) else [((), values)]:
        family.add_metric(key, value)
    return family


def _by_name(values: Mapping[str, int]) -> Values:
    return [((name,), value) for name, value in values.items()]
