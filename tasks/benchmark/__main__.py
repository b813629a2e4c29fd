"""Measure drafts where it counts: the plain server and the ones with a draft on the same questions, side by side.

    python -m tasks.benchmark     # artifacts/export -> reports/benchmark.{json,html}, benchmark_{cells,prompts}.csv, plots/

Acceptance length as the contract defines it, survival by position, tokens per second of one reader and of all, time to first
token and between tokens, by set of questions and requests at once; the speed-up with its interval; what acceptance would be
needed to break even; and whether greedy text is the same with the draft as without. What a benchmark that died had measured
stays in reports/benchmark.partial.json.
"""

from tasks.benchmark.arms import arms_of
from tasks.benchmark.drawing import PLOTS, write_csv
from tasks.benchmark.measure import measure
from tasks.benchmark.page import PAGE, write_page
from tasks.benchmark.partial import REPORT, Partial
from tasks.benchmark.plots import plot_all
from tasks.benchmark.questions import loads_of
from tasks.benchmark.rows import cell_rows, prompt_rows
from tasks.benchmark.show import show
from tasks.benchmark.summary import compared, headline_comparison, summarise
from tasks.common.files import REPORTS, write_json
from tasks.common.headline import headline
from tasks.common.machine import machine
from tasks.common.measured_draft import identities
from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker
from tasks.common.training_report import predicted_accept_length

CELLS, PROMPTS = REPORTS / "benchmark_cells.csv", REPORTS / "benchmark_prompts.csv"


def main(params: Params, tracker: Tracker) -> None:
    arms, loads = arms_of(params), loads_of(params)
    predicted, identity = prediction(params), identities() | {"machine": machine(params.target.device)}

    with Partial(params, earlier=(REPORT, PAGE, CELLS, PROMPTS, *PLOTS.glob("*"))) as partial:
        measured = measure(arms, loads, params, partial)
        report = summarise(measured, arms, params, predicted, identity)
        write_csv(PROMPTS, prompt_rows(headline_comparison(compared(measured.passes, arms)).pairs))
        write_json(REPORT, report)
    write_csv(CELLS, cell_rows(report))
    plots = plot_all(report)
    write_page(report, plots)

    show(report)
    for point in headline("benchmark", params):
        tracker.log_metrics({point.name: point.value}, point.step)
    for path in (REPORT, PAGE, CELLS, PROMPTS, *(plot.png for plot in plots)):
        tracker.log_artifact(path)


def prediction(params: Params) -> float | None:
    """Acceptance length that training predicted from the held-out prompts; None where other questions are asked.

    Raises:
        DraftlineError: its report is absent or damaged, or says nothing of serve.num_steps.
    """
    return None if params.benchmark.sets else predicted_accept_length(params.serve.num_steps)


if __name__ == "__main__":
    run_stage("benchmark", main)
