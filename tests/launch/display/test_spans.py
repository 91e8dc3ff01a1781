"""A span for each phase where OpenTelemetry is configured, and not one import where it is not."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipette_launch.launch.display.spans import Spans

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}


class Recorder:
    """Stands in for a tracer provider, and notes what is asked of it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def add_span_processor(self, _: object) -> None:
        """Take it."""

    def get_tracer(self, _: str) -> Recorder:
        """One tracer is enough."""
        return self

    def start_span(self, name: str, attributes: dict[str, Any]) -> SimpleNamespace:
        """Note the beginning, and at its call the end."""
        self.seen.append(f"{name} {attributes}")
        return SimpleNamespace(end=lambda: self.seen.append(f"end of {name}"))

    def force_flush(self, _: int) -> None:
        """Note it."""
        self.seen.append("flush")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """OpenTelemetry as far as it is used, its provider a recorder."""
    made = Recorder()
    for name, content in {
        "opentelemetry.exporter.otlp.proto.http.trace_exporter": {"OTLPSpanExporter": object},
        "opentelemetry.sdk.trace": {"TracerProvider": lambda **_: made},
        "opentelemetry.sdk.trace.export": {"BatchSpanProcessor": lambda _: None},
        "opentelemetry.sdk.resources": {"Resource": SimpleNamespace(create=dict)},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_each_phase_has_a_span(recorder: Recorder) -> None:
    """One ends where the next begins, and the last with the job, which then sends what is left."""
    spans = Spans(ENDPOINT)
    spans.begin("warmup", {"nodes": 2})
    spans.begin("train", {"nodes": 2, "layout": "tp2"})
    spans.end()

    assert [
        "warmup {'pipette.nodes': 2}",
        "end of warmup",
        "train {'pipette.nodes': 2, 'pipette.layout': 'tp2'}",
        "end of train",
        "flush",
    ] == recorder.seen


def test_without_an_endpoint_nothing_happens(recorder: Recorder) -> None:
    """Whether or not it is installed."""
    spans = Spans({})
    spans.begin("train", {})
    spans.end()

    assert [] == recorder.seen


def test_what_is_missing_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With what to install; the job goes on."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    spans = Spans(ENDPOINT)
    spans.begin("warmup", {})
    spans.begin("train", {})
    spans.end()

    assert 1 == len(caplog.records)
    assert "install opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http" in caplog.records[0].message
