"""reports/benchmark.html, from planted figures."""

import re
from html.parser import HTMLParser

import pytest

from tasks.benchmark.page import render, write_page
from tasks.benchmark.plots import plot_all
from tests.benchmark.planted_report import planted_report

VOID = ("meta", "br", "path", "use", "rect")


class Text(HTMLParser):
    """Text of a page, with the elements that were opened and not closed."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.parts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.parts.append(data)

    def __str__(self) -> str:
        return " ".join(" ".join(self.parts).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Renders a report."""
    folder = tmp_path_factory.mktemp("plots")
    return lambda report: render(report, plot_all(report, folder))


def text(page: str) -> str:
    parsed = Text(page)
    assert not parsed.open
    return str(parsed)


def rows(page: str) -> list[str]:
    """Of the table of cells."""
    return re.findall(r"<tr[^>]*>\s*<td>.*?</tr>", page[page.index('<table class="cells">') :], re.DOTALL)


def test_the_page_needs_nothing_from_elsewhere(page):
    whole = page(planted_report(drafts=("theirs",)))
    assert not re.findall(r"https?://|src=|@import|<script|<link|<img", whole)
    assert not re.findall(r"url\((?!#)|href=\"(?!#)", whole)


def test_the_headline_comes_first_with_its_interval_and_what_breaks_even(page):
    said = text(page(planted_report(concurrency=(1, 64))))
    assert said.startswith("Benchmark: 1.53 times the plain server")
    head = said[: said.index("What follows")]
    for part in (
        "1.53 times as fast",
        "95 %: 1.46 to 1.61",
        "2.32 acceptance length, of at most 4",
        "1.52",
        "Same text",
    ):
        assert part in head


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [([1.02, 1.2], "times as fast"), ([0.8, 0.98], "Slower with the draft"), ([0.97, 1.04], "No difference shown")],
)
def test_the_verdict_is_that_of_the_interval(page, interval, verdict):
    assert verdict in text(page(planted_report() | {"speedup_interval": interval}))


def test_advice_stands_before_the_table(page):
    whole = page(planted_report())
    assert whole.index("2 draft steps instead of 3 would need") < whole.index('<table class="cells">')
    assert "What follows" not in page(planted_report() | {"advice": []})


def test_every_cell_is_a_row_of_its_drafts_table(page):
    report = planted_report(concurrency=(1, 4), drafts=("theirs",))
    whole = page(report)
    assert len(re.findall('<table class="cells">', whole)) == 2
    assert len(re.findall(r'<td class="number">\d+</td>\n<td class="number"><span', whole)) == len(report["cells"])
    assert text(whole).index("This draft artifacts/export") < text(whole).index("Draft theirs drafts/theirs")


def test_beside_other_drafts_every_heading_says_that_it_speaks_of_ours(page):
    said = text(page(planted_report(drafts=("theirs",))))
    for heading in ("1.53 times as fast with this draft", "This draft: acceptance length 2.32 of at most 4"):
        assert heading in said
    assert "This draft: " not in text(page(planted_report()))


def test_the_page_says_when_and_where_it_was_measured_before_any_figure(page):
    said = text(page(planted_report()))
    assert said.index("Measured 2026-11-30 20:16 UTC on NVIDIA H200, 16 cores, with SGLang 0.5.23") < said.index(
        "speed-up"
    )


def test_speeds_are_those_whose_ratio_the_speed_up_is(page):
    report = planted_report(concurrency=(1,), sets=("heldout",), temperatures=(0.0,))
    row = rows(page(report))[0]
    drafted, plain = 1e3 * 2.3992 / 2.35, 1e3 / 1.55
    assert f">{drafted:,.0f} (" in row and f"<small>{plain:,.0f} (" in row
    assert f">{drafted / plain:.2f}</span>" in row


def test_commands_in_advice_are_set_as_code(page):
    whole = page(planted_report() | {"advice": ["Tune: `python -m tasks.tune_server` <does>."]})
    assert "Tune: <code>python -m tasks.tune_server</code> &lt;does&gt;." in whole


def test_acceptance_by_context_says_that_it_pools_the_loads(page):
    assert "all numbers of requests at once and all repeats together" in text(page(planted_report()))


def test_settings_without_effect_are_left_out(page):
    report = planted_report()
    assert "cuda graph yes" in text(page(report))
    report["settings"] |= {"device": "cpu"}
    both = {"attention_backend": "torch_native", "decode_attention_backend": "a", "prefill_attention_backend": "b"}
    report["settings"]["conditions"] |= both
    said = text(page(report))
    assert "cuda graph" not in said and "torch_native" not in said and "decode attention backend a" in said


def test_what_breaks_even_is_marked_reached_or_short_also_without_colour(page):
    first, last = rows(page(planted_report(concurrency=(1, 64), sets=("heldout",), temperatures=(0.0,))))[:2]
    assert '<span class="good">1.52</span><small>+0.88</small>' in first
    assert '<span class="bad">2.73</span><small>0.33 short</small>' in last


def test_sampled_answers_say_their_temperature_and_are_not_compared(page):
    greedy, sampled = rows(page(planted_report(concurrency=(1,), sets=("heldout",))))[:2]
    assert "temperature" not in greedy
    assert "100 %</td>" in greedy
    assert "temperature 1" in sampled
    assert "–</td>" in sampled


def test_a_cell_without_streamed_answers_has_no_latency(page):
    report = planted_report(concurrency=(1,), sets=("heldout",), temperatures=(0.0,))
    nothing = {"p50": None, "p99": None}
    report["cells"][0] |= {"inter_token_ms": nothing, "baseline_inter_token_ms": nothing}
    assert '<td class="number">–<small>–</small></td>' in rows(page(report))[0]


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "bad"), ("bfloat16", "warn")])
def test_text_that_differs_is_named_and_is_a_fault_in_float32_alone(page, dtype, kind):
    report = planted_report() | {
        "lossless": False,
        "first_difference": {"prompt": "gsm8k-17", "position": 31, "baseline": [412], "speculative": []},
        "agreement": {"answers": 0.9961, "tokens": 0.9973},
    }
    report["settings"]["dtype"] = dtype
    whole = page(report)
    assert f'<span class="verdict {kind}">Text differs</span>' in whole
    assert "prompt gsm8k-17 , answer token 31: 412 without the draft, the end with it" in text(whole)
    assert "99.6 % of the answers are the same" in text(whole)
    assert ("Do not serve" in whole) == (dtype == "float32")


def test_a_prediction_that_cannot_be_compared_is_left_out(page):
    assert "predicted in training" in text(page(planted_report()))
    assert "predicted" not in text(page(planted_report() | {"predicted_accept_length": None}))


def test_plots_that_one_concurrency_cannot_have_are_said_to_be_missing(page):
    assert "only 1 request at a time was measured" in text(page(planted_report(concurrency=(1,))))


def test_names_are_not_markup(page):
    report = planted_report()
    report["by_domain"][0]["domain"] = "<script>alert(1)</script>"
    assert "<script" not in page(report)


def test_the_same_report_gives_the_same_bytes(tmp_path):
    written = []
    for name in ("a", "b"):
        report = planted_report()
        write_page(report, plot_all(report, tmp_path / name), tmp_path / f"{name}.html")
        written.append((tmp_path / f"{name}.html").read_bytes())
    assert written[0] == written[1]
