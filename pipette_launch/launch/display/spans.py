"""A span for each phase of a job, where OpenTelemetry is configured and installed; nothing is imported elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipette_launch.facts.messages import Decision

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
NEEDED = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
FLUSH_MS = 5000
"""How long the end of a job may wait for a collector."""


class Spans:
    """Begins and ends spans; does nothing without an endpoint."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._is_wanted = any(environ.get(name) for name in ENDPOINTS)
        self._provider: Any = None
        self._span: Any = None

    def begin(self, phase: str, about: Mapping[str, str | int | float]) -> None:
        """End the span of the phase before, and begin that of this one, with these attributes."""
        if self._span is not None:
            self._span.end()
            self._span = None
        if self._is_wanted and (self._provider is not None or self._connect()):
            attributes = {f"pipette.{name}": value for name, value in about.items()}
            self._span = self._provider.get_tracer("pipette_launch").start_span(phase, attributes=attributes)

    def end(self) -> None:
        """End the last span, and send what is left."""
        if self._span is not None:
            self._span.end()
            self._span = None
        if self._provider is not None:
            self._provider.force_flush(FLUSH_MS)

    def _connect(self) -> bool:
        """Make a provider of our own, so that no other code of this process gets one; false where that cannot be."""
        try:
            exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
            sdk, export = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
            resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": "pipette-launch"})
        except ImportError:
            self._is_wanted = False
            logger.warning("an OTLP endpoint is set, but no spans are sent: install %s", NEEDED)
            return False
        self._provider = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        return True


def phase_attributes(decision: Decision) -> dict[str, str | int | float]:
    """What a span says of its phase."""
    runs = decision.choice or (decision.plan.own if decision.plan else None)
    if runs is None:
        return {"nodes": len(decision.hosts)}
    layout, seconds = runs.layout.words(), runs.step_time_s
    return {"nodes": len(decision.hosts), "layout": layout, "predicted_step_s": seconds}
