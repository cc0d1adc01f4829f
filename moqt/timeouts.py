"""Delivery timeouts: how old an Object or a Subgroup may become before it is no longer sent (moqt 12.7)."""

from __future__ import annotations

from dataclasses import dataclass

from moqt.wire import Parameters, Properties, PropertyType, get

__all__ = ["Timeouts"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds; 0: none. Of an Object from its arrival until it is handed to QUIC, of a Subgroup from the
    arrival of its last Object until all of it is.
    """

    of_object: float = 0.0
    of_subgroup: float = 0.0

    @classmethod
    def asked(cls, parameters: Parameters, before: Timeouts | None = None) -> Timeouts:
        """Those of a subscriber; what an update does not name stays as it was `before`."""
        object_ms, subgroup_ms = parameters.object_delivery_timeout, parameters.subgroup_delivery_timeout
        known = before or cls()
        return cls(
            known.of_object if object_ms is None else object_ms / 1000,
            known.of_subgroup if subgroup_ms is None else subgroup_ms / 1000,
        )

    @classmethod
    def said(cls, properties: Properties, otherwise: Timeouts | None = None) -> Timeouts:
        """Those of a publisher, in the properties of the first Object of a Subgroup, `otherwise` of the
        Track.
        """
        known = otherwise or cls()
        of_object = get(properties, PropertyType.OBJECT_DELIVERY_TIMEOUT)
        of_subgroup = get(properties, PropertyType.SUBGROUP_DELIVERY_TIMEOUT)
        return cls(
            of_object / 1000 if isinstance(of_object, int) else known.of_object,
            of_subgroup / 1000 if isinstance(of_subgroup, int) else known.of_subgroup,
        )

    def with_(self, other: Timeouts) -> Timeouts:
        """The smaller of each that is not 0."""
        return Timeouts(
            _smaller(self.of_object, other.of_object), _smaller(self.of_subgroup, other.of_subgroup)
        )


def _smaller(one: float, other: float) -> float:
    return min(one, other) if one and other else one or other
