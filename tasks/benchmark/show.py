"""The benchmark in a table for the terminal."""

from tasks.common.console import console


def show(report: dict) -> None:
    """Print what was measured, acceptance beside all that it depends on."""
    from rich.table import Table

    speculative, baseline, settings = report["speculative"], report["baseline"], report["settings"]
    low, high = report["speedup_interval"]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "acceptance length",
        f"{speculative['accept_length']:.3f} of at most {settings['steps'] + 1} "
        f"({speculative['correct_drafts']} draft tokens in {speculative['verify_rounds']} rounds; "
        f"predicted {report['predicted_accept_length']:.3f})",
    )
    table.add_row("survival", " ".join(f"{100 * share:.0f} %" for share in speculative["survival"]))
    table.add_row(
        "tokens per second", f"{speculative['tokens_per_s']:.1f} with the draft, {baseline['tokens_per_s']:.1f} without"
    )
    table.add_row(
        "speed-up",
        f"{report['speedup']:.2f} (95 %: {low:.2f} to {high:.2f}); break-even at an acceptance length of "
        f"{report['break_even_accept_length']:.2f}",
    )
    table.add_row(
        "lossless", "yes: greedy text is the same" if report["lossless"] else f"NO: {report['first_difference']}"
    )
    for row in report["by_domain"]:
        table.add_row(
            f"  {row['domain']}", f"{row['accept_length']:.2f}, speed-up {row['speedup']:.2f}, {row['prompts']} prompts"
        )
    table.add_row(
        "settings",
        f"SGLang {settings['version']}, {settings['device']}, {settings['dtype']}, steps {settings['steps']}, top-k "
        f"{settings['topk']}, draft tokens {settings['draft_tokens']}, greedy, {settings['max_new_tokens']} new tokens, "
        f"{settings['prompts']} prompts x {settings['repeats']}, servers {settings['servers']}",
    )
    console().print(table)
