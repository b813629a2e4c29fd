"""Measure the draft where it counts: plain and speculative server on the same held-out prompts, one request at a time.

    python -m tasks.benchmark     # artifacts/export -> reports/benchmark.json, benchmark_prompts.csv, plots/

Acceptance length as the contract defines it, with survival by position; tokens per second of both servers, their
ratio with its spread over prompts; and whether greedy text is the same with the draft as without.
"""

from tasks.benchmark.measure import fit_together, measure
from tasks.benchmark.plots import plot_accept_length_by_domain, plot_survival, plot_throughput, write_csv
from tasks.benchmark.show import show
from tasks.benchmark.summary import prompt_rows, summarise
from tasks.common.files import REPORTS, read_json, write_json
from tasks.common.headline import headline
from tasks.common.params import Params
from tasks.common.prompts import spread_over_domains
from tasks.common.responses import read_responses
from tasks.common.server_plan import baseline_plan
from tasks.common.speculative_plan import speculative_plan
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker

REPORT = REPORTS / "benchmark.json"
PROMPTS = REPORTS / "benchmark_prompts.csv"


def main(params: Params, tracker: Tracker) -> None:
    speculative = speculative_plan(params)
    baseline = baseline_plan(params, port=params.serve.port + 1)
    prompts = spread_over_domains(list(read_responses("heldout")), params.benchmark.num_prompts)
    predicted = read_json(REPORTS / "train_draft.json")["predicted_accept_length"]

    side_by_side = fit_together((baseline, speculative), params)
    pairs = measure(baseline, speculative, prompts, params, side_by_side)

    report = summarise(pairs, params, predicted, side_by_side)
    rows = prompt_rows(pairs)
    write_json(REPORT, report)
    write_csv(PROMPTS, rows)
    plots = [plot_survival(report), plot_accept_length_by_domain(report), plot_throughput(report, rows)]
    show(report)
    for point in headline(["benchmark"]):
        tracker.log_metrics({point.name: point.value}, point.step)
    for path in (REPORT, PROMPTS, *plots):
        tracker.log_artifact(path)


if __name__ == "__main__":
    run_stage("benchmark", main)
