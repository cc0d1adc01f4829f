"""What the demo concludes from what both processes report."""

from examples.report import Report


def reported(producer: list[int], consumer: list[int]) -> Report:
    report = Report()
    for name, tokens in (("producer", producer), ("consumer", consumer)):
        for at, token in enumerate(tokens):
            report.note(name, {"event": "token", "token": token, "text": f"<{token}>", "at": float(at)})
    return report


def test_texts_are_the_same_only_token_for_token() -> None:
    assert reported([5, 6, 7], [5, 6, 7]).same
    for producer, consumer, agreeing in (
        ([5, 6, 7], [5, 6, 8], 2),
        ([5, 6, 7], [5, 6], 2),
        ([5, 6], [5, 6, 7], 2),
        ([5], [6], 0),
        ([], [], 0),
    ):
        report = reported(producer, consumer)
        assert not report.same
        assert report.agreeing == agreeing


def test_the_consumers_first_token_is_marked() -> None:
    report = reported([1, 2], [1, 2])
    assert report.timeline.relative_marks() == [("first token", 0.0)]
    assert (report.text("producer"), report.text("consumer")) == ("<2>", "<2>")
    assert Report().text("consumer") == ""


def test_figures_are_told_of_a_cache_that_arrived_whole() -> None:
    report = Report()
    report.note(
        "consumer", {"event": "loaded", "layers": 2, "model": "a/b", "tokens": 70, "block_tokens": 32}
    )
    report.note("producer", {"event": "started", "at": 10.0})
    for layer, at in enumerate((11.0, 12.0)):
        report.note("producer", {"event": "step", "step": "computed", "layer": layer, "at": at})
        for step, delay in (("arrived", 0.125), ("verified", 0.25), ("used", 0.5)):
            report.note("consumer", {"event": "step", "step": step, "layer": layer, "at": at + delay})
    assert list(report.figures()) == []
    assert report.subtitle() == "It did not arrive whole."
    assert report.foreseen() == 2.5
    report.note(
        "consumer", {"event": "received", "octets": 2_500_000, "objects": 8, "rejected": 1, "computing": 0.75}
    )
    report.note("consumer", {"event": "token", "token": 1, "text": "a", "at": 12.75})
    assert dict(report.figures()) == {
        "cache": "2.5 MB in 8 Objects, each one verified; 1 refused",
        "layer 0": "usable after 1.25 s, 250 ms after it was computed",
        "all layers": "usable after 2.25 s, 250 ms after the last one was computed",
        "lag": "250 ms from computed to verified, at most 250 ms",
        "first token": "written by the consumer after 2.75 s, 750 ms after the last layer was computed",
        "work": "the producer computed for 2.00 s, the consumer for 750 ms",
    }
    assert report.title() == "The KV cache of 64 tokens leaves b layer by layer"
    assert report.timeline.relative_marks()[0] == ("last layer computed", 2.0)
